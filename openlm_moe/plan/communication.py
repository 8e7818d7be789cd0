"""Bytes that one GPU sends in an optimizer step, collective by collective, in closed form.

The units of FSDP are those that `openlm_moe.parallel` would make of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from openlm_moe.hosts.builtin.count import build_on_meta
from openlm_moe.parallel.units import Unit, plan_units
from openlm_moe.plan.activations import norm_output_bytes
from openlm_moe.plan.gpus import GPU
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import balanced_rows

FP32, INT32 = 4, 4


@dataclass(frozen=True)
class Collective:
    """One kind of collective over groups of `ranks` GPUs, all its calls of one optimizer step together.

    payload: bytes of the whole tensors: all-gather's outputs, reduce-scatter's, all-reduce's and all-to-all's inputs.
    """

    name: str
    kind: str  # "all-gather", "reduce-scatter", "all-reduce" or "all-to-all"
    ranks: int
    calls: int
    payload: float
    crosses_nodes: bool

    @property
    def sent(self) -> float:
        """Bytes that leave one GPU (ring algorithms; all-to-all with balanced routing)."""
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.payload * (self.ranks - 1) / self.ranks

    def seconds(self, gpu: GPU, job: Job) -> float:
        """Time at full bandwidth. Rings between nodes use the adapters of all GPUs of a node together."""
        on_link = self.sent / gpu.link
        if not self.crosses_nodes:
            return on_link
        adapters = job.local_gpus if self.kind != "all-to-all" else 1
        outside = 1.0 if self.kind != "all-to-all" else (self.ranks - job.local_gpus) / (self.ranks - 1)
        return max(on_link, self.sent * outside / (adapters * gpu.network))


def collectives(job: Job) -> list[Collective]:
    """Every collective of one optimizer step that moves more than a few numbers; none on a single GPU."""
    found = [*_sharding(job), *_all_to_all(job)]
    return [c for c in found if c.ranks > 1 and c.payload > 0]


def _sharding(job: Job) -> Iterator[Collective]:
    """All-gathers and gradient reductions, dense parameters and experts apart."""
    gathered: dict[str, list[float]] = {"dense": [0, 0.0], "experts": [0, 0.0]}
    reduced: dict[str, list[float]] = {"dense": [0, 0.0], "experts": [0, 0.0]}
    for unit in _units(job):
        part = "experts" if unit.kind == "experts" else "dense"
        size = _unit_size(job, unit)
        times = 1 if unit.keep_gathered or unit.kind == "embedding" or not job.reshard_after_forward else 2
        in_fp32 = unit.kind == "router"
        gathered[part][0] += times
        gathered[part][1] += times * size * (FP32 if in_fp32 else job.gather_bytes)
        reduced[part][0] += 1
        reduced[part][1] += size * (FP32 if in_fp32 else job.reduce_bytes)
    for part, shards in (("dense", job.shards), ("experts", job.expert_shards)):
        replicas = job.gpus // shards // (job.expert_parallel if part == "experts" else 1)
        micro = job.accum_freq
        calls, payload = gathered[part]
        yield Collective(
            f"all-gather of {part}",
            "all-gather",
            shards,
            int(calls * micro),
            payload * micro,
            job.span > job.local_gpus,
        )
        calls, payload = reduced[part]
        yield Collective(
            f"gradients of {part}",
            "reduce-scatter",
            shards,
            int(calls * micro),
            payload * micro,
            job.span > job.local_gpus,
        )
        yield Collective(
            f"gradients of {part} over replicas",
            "all-reduce",
            replicas,
            int(calls * micro),
            payload / shards * micro,
            job.gpus > job.local_gpus,
        )


def _units(job: Job) -> list[Unit]:
    model = build_on_meta(job.params, job.moe)
    units = plan_units(model)
    if job.params.weight_tying:  # the root holds what is tied, and keeps it gathered
        units.append(Unit("dense", [model.output], keep_gathered=True))
    return units


def _unit_size(job: Job, unit: Unit) -> float:
    """Elements that a unit's collective moves, padding included."""

    def size(parameter: nn.Parameter) -> float:
        if unit.kind == "experts":
            return parameter.numel() / job.expert_parallel
        rows = parameter.shape[0]
        return math.ceil(rows / job.shards) * job.shards * (parameter.numel() / rows)

    return sum(size(parameter) for module in unit.modules for parameter in module.parameters())


def _all_to_all(job: Job) -> Iterator[Collective]:
    """Rows and their weights to the experts and results back, and the same for gradients."""
    if job.expert_parallel == 1:
        return
    layers = len(job.moe.moe_layer_ids(job.params.n_layers)) * job.accum_freq
    rows, dim = balanced_rows(job), job.params.dim
    forwards = 2 if job.checkpointing == "block" else 1  # a recomputed block sends its rows again
    crosses = job.expert_parallel > job.local_gpus
    to_experts = rows * (dim * norm_output_bytes(job, job.residual_bytes) + FP32)
    back = rows * dim * job.compute_bytes
    for name, each, times, calls in (
        ("rows to the experts", to_experts, forwards + 1, 2),
        ("results of the experts", back, forwards + 1, 1),
        ("counts of rows", job.moe.num_experts * INT32, forwards, 1),
    ):
        yield Collective(
            f"all-to-all: {name}",
            "all-to-all",
            job.expert_parallel,
            layers * times * calls,
            layers * times * each,
            crosses,
        )
