"""Building from the meta device: each rank makes only its share, on its own, with one process's values. Two ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import toy
from torch import nn

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import make_layout, materialise, parallelize
from openlm_moe.parallel.mesh import Layout

CPU = torch.device("cpu")


def make(params: ModelParams, moe: MoEConfig, layout: Layout, seed: int, offload: bool = False) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(params, moe)
    options = {"cpu_offload": offload} if layout.fsdp else {}
    return materialise(parallelize(model, layout, **options), layout, seed, cpu_offload=offload)


def bitwise(layout: Layout, tying: bool = False) -> bool:
    """All values, and what the model computes from them, against a build in one process."""
    params = ModelParams(dim=48, n_layers=2, n_heads=4, seq_len=8, vocab_size=2100, qk_norm=True, weight_tying=tying)
    moe = MoEConfig(num_experts=4, ffn_dim=40, ffn="swiglu", shared_experts=1, balance="bias")
    with torch.device("meta"):
        one = Transformer(params, moe)
    one.to_empty(device=CPU).init_weights(11)
    model = make(params, moe, layout, 11)
    wanted, found = toy.weights(one), toy.weights(model)
    other = toy.weights(make(params, moe, layout, 12))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        close = toy.worst([model(tokens)], [one(tokens)]) < 1e-5
    embedding = "tok_embeddings.weight"
    fresh = not torch.equal(other[embedding], found[embedding])
    same = wanted.keys() == found.keys() and all(map(torch.equal, wanted.values(), found.values()))
    return close and fresh and same


def peak(layout: Layout) -> dict[str, float]:
    """Memory of this process in MB while it builds: the most beyond before, and what stays by its own parameters."""
    params = ModelParams(dim=256, n_layers=2, n_heads=4, seq_len=8, vocab_size=64)
    moe = MoEConfig(num_experts=32, ffn_dim=1024, every=1)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    model = make(params, moe, layout, 0)
    most = memory("VmHWM") - before
    share = sum(p.to_local().numel() * 4 for p in model.parameters()) / 2**20
    whole = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    return {"most": toy.max_over_ranks(most), "share": share, "whole": whole, "expert matrix": 256 * 1024 * 4 / 2**20}


def memory(field: str) -> float:
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) / 2**10


def program(arguments: list[str]) -> dict[str, Any]:
    layouts = {
        "fsdp": make_layout(True, False, "off", 4, CPU),
        "fsdp and experts": make_layout(True, False, 2, 4, CPU),
        "experts": make_layout(False, False, 2, 4, CPU),
        "replicated": make_layout(False, False, "off", 4, CPU),
    }
    found: dict[str, Any] = {"bitwise": {name: bitwise(layout) for name, layout in layouts.items()}}
    # After what is imported only at first use has been.
    found["peak"] = {name: peak(layouts[name]) for name in ("fsdp", "fsdp and experts", "experts")}
    found["tied"] = bitwise(layouts["fsdp and experts"], tying=True)
    return found


if __name__ == "__main__":
    toy.main(program)
