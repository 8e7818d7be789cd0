"""What to change when a job does not fit: the smallest change first, each with what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from openlm_moe import UserError
from openlm_moe.plan.gpus import GPU
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import available, estimate_memory


@dataclass(frozen=True)
class Advice:
    """A change of flags, the peak memory with it, and whether that fits."""

    change: str
    peak: float
    fits: bool


def advise(job: Job, gpu: GPU) -> list[Advice]:
    """Changes in the order to try them, each on top of those before, up to the first that fits."""
    found: list[Advice] = []
    for change, changed in _changes(job):
        peak = estimate_memory(changed).peak()
        found.append(Advice(change, peak, peak <= available(gpu)))
        if found[-1].fits:
            break
    return found


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Each change that applies, with the job after it and all before it."""
    if job.gpus > 1 and job.fsdp == "off":
        job = replace(job, fsdp="amp" if job.autocast else "fp32")
        yield "shard with " + ("--fsdp --fsdp-amp" if job.autocast else "--fsdp"), job
    elif job.fsdp == "fp32" and job.autocast:
        job = replace(job, fsdp="amp")
        yield "gather in bf16 with --fsdp-amp", job
    if job.hybrid:
        job = replace(job, hybrid=False)
        yield "shard over all nodes: no --fsdp-hybrid", job
    local = gcd(job.moe.num_experts, gcd(job.local_gpus, job.span)) if job.moe.num_experts else 1
    if local > job.expert_parallel and job.expert_parallel == 1:
        job = replace(job, expert_parallel=local)
        yield f"split the experts with --expert-parallel {local}", job
    if job.moe.num_experts and job.checkpointing == "off":
        yield "--grad-checkpointing --grad-checkpointing-scope experts", replace(job, checkpointing="experts")
    while job.sequences % 2 == 0:
        job = replace(job, accum_freq=job.accum_freq * 2)
        yield f"smaller micro-batches with --accum-freq {job.accum_freq}", job
    if job.checkpointing != "block":
        job = replace(job, checkpointing="block")
        yield "--grad-checkpointing", job
    for gpus in (job.gpus * 2, job.gpus * 4, job.gpus * 8):
        try:
            more = replace(job, gpus=gpus, accum_freq=max(job.accum_freq * job.gpus // gpus, 1))
            more = replace(more, fsdp="amp" if job.autocast else "fp32") if job.fsdp == "off" else more
        except UserError:
            continue
        yield f"{gpus} GPUs", more
