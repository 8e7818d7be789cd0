"""One rank of `bench scale`. All sizes are built in the same processes, and their steps take turns."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from openlm_moe import MoEConfig, collect_losses
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import init_distributed, make_layout, materialise, parallelize, shutdown
from openlm_moe.parallel.record import Collective, record_collectives
from openlm_moe.plan.communication import collectives
from openlm_moe.plan.job import Job


def main() -> None:
    device = init_distributed()
    found = measure(json.loads(sys.argv[1]), device)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    shutdown()


def measure(request: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """For each size: median seconds of a step (of the slowest rank), counted and computed bytes by kind."""
    values = dict(request["params"])
    params = ModelParams(dim=values.pop("hidden_dim"), **values)
    moe = MoEConfig.from_dict(request["moe"])
    models = [build(params, moe, ep, request["fsdp"], device) for ep in request["sizes"]]
    tokens = torch.randint(params.vocab_size, (request["sequences"], params.seq_len), device=device)
    counted = []
    for model in models:
        step(model, tokens)
        with record_collectives() as found:
            step(model, tokens)
        counted.append(mean_bytes(found))
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(request["steps"]):
        for model, times in zip(models, seconds, strict=True):
            times.append(timed_step(model, tokens))
    return [
        {
            "ep": ep,
            "seconds": statistics.median(times),
            "counted": bytes_by_kind,
            "computed": closed_form(params, moe, ep, request),
        }
        for ep, times, bytes_by_kind in zip(request["sizes"], seconds, counted, strict=True)
    ]


def build(params: ModelParams, moe: MoEConfig, ep: int, fsdp: bool, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(params, moe)
    layout = make_layout(fsdp, False, ep, moe.num_experts, device)
    return materialise(parallelize(model, layout), layout, seed=0)


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    with collect_losses(model):
        model(tokens).logsumexp(dim=-1).mean().backward()
    model.zero_grad(set_to_none=True)


def timed_step(model: nn.Module, tokens: torch.Tensor) -> float:
    _wait(tokens.device)
    dist.barrier()
    begin = time.perf_counter()
    step(model, tokens)
    _wait(tokens.device)
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def mean_bytes(found: list[Collective]) -> dict[str, float]:
    """Payload by kind, averaged over ranks: all-gathers' outputs, the others' inputs. Groups of one do not count."""
    sums: dict[str, float] = {}
    for collective in found:
        if collective.ranks > 1:
            size = collective.output_bytes if collective.kind == "all-gather" else collective.input_bytes
            sums[collective.kind] = sums.get(collective.kind, 0.0) + size
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    kinds = {kind for one in everyone for kind in one}
    return {kind: sum(one.get(kind, 0.0) for one in everyone) / len(everyone) for kind in kinds}


def closed_form(params: ModelParams, moe: MoEConfig, ep: int, request: dict[str, Any]) -> dict[str, float]:
    """The same by `plan`'s formulas."""
    world = dist.get_world_size()
    job = Job(
        params,
        moe,
        gpus=world,
        gpus_per_node=world,
        global_batch_size=world * request["sequences"],
        precision="fp32",
        fsdp="fp32" if request["fsdp"] else "off",
        expert_parallel=ep,
        device="cpu",
    )
    sums: dict[str, float] = {}
    for collective in collectives(job):
        sums[collective.kind] = sums.get(collective.kind, 0.0) + collective.payload
    return sums


if __name__ == "__main__":
    main()
