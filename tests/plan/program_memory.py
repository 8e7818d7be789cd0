"""One rank of jobs whose memory is measured; writes JSON. Started by test_plan_memory.py with torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import measure

from openlm_moe import MoEConfig, moe_layers
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import init_distributed, make_layout, shutdown
from openlm_moe.parallel.fsdp import materialise, parallelize
from openlm_moe.parallel.record import Collective, record_collectives


def one_step(what: dict, device: torch.device) -> dict[str, Any]:
    """Bytes on this rank, and moved by it, in one training step of the job that `what` describes."""
    params, moe = ModelParams(**what["params"]), MoEConfig.from_dict(what["moe"])
    layout = make_layout(what["fsdp"] != "off", False, what["expert_parallel"], moe.num_experts, device)
    with torch.device("meta"):
        model = Transformer(params, moe)
    parallelize(model, layout, **({} if what["fsdp"] == "off" else {"precision": what["fsdp"]}))
    materialise(model, layout, seed=0).train()
    if what["worst"]:  # every token prefers the experts of rank 0
        for _, layer in moe_layers(model):
            layer.router.expert_bias.copy_(torch.linspace(100, 0, moe.num_experts))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(layout.rank)
    tokens = torch.randint(0, params.vocab_size, (what["sequences"], params.seq_len))
    with record_collectives() as recorded, measure.forward(model, tokens, what["precision"]) as (loss, saved):
        kept = saved.bytes
        loss.backward()
    optimizer.step()
    moments = (t for entry in optimizer.state.values() for t in entry.values() if t.dim() > 0)
    return {
        "weights": measure.held(model.parameters()),
        "gradients": measure.held(p.grad for p in model.parameters()),
        "optimizer": measure.held(moments),
        "activations": kept,
        "collectives": moved(recorded),
    }


def moved(recorded: list[Collective]) -> dict[str, list[int]]:
    """{kind: [calls, bytes]} over groups of more than one rank."""
    totals: dict[str, list[int]] = {}
    for c in recorded:
        if c.ranks > 1:
            calls, size = totals.get(c.kind, [0, 0])
            size += c.output_bytes if c.kind == "all-gather" else c.input_bytes
            totals[c.kind] = [calls + 1, size]
    return totals


def main(jobs: Path) -> None:
    """Measures every job of the JSON file, and writes the list of results beside it."""
    device = init_distributed()
    records = [one_step(what, device) for what in json.loads(jobs.read_text())]
    jobs.with_suffix(f".{torch.distributed.get_rank()}").write_text(json.dumps(records))
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
