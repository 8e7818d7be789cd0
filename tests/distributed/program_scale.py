"""`bench scale`'s measurement. Argument: fsdp|replicate."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import toy

from openlm_moe import MoEConfig
from openlm_moe.bench.scale_worker import measure
from openlm_moe.hosts.builtin.params import ModelParams


def program(arguments: list[str]) -> dict[str, Any]:
    params = ModelParams(dim=48, n_layers=3, n_heads=4, seq_len=16, vocab_size=101, model_norm="rms_norm")
    moe = MoEConfig(num_experts=8, ffn_dim=32, ffn="swiglu", shared_experts=1)
    sizes = [n for n in (1, 2, 4) if dist.get_world_size() % n == 0]
    request = {"params": params.to_json(), "moe": moe.to_dict(), "sizes": sizes, "sequences": 2, "steps": 1}
    return {"sizes": measure({**request, "fsdp": arguments[0] == "fsdp"}, torch.device("cpu"))}


if __name__ == "__main__":
    toy.main(program)
