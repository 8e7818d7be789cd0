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
    """A change, the flags that make it, the peak memory with it and all before it, and whether that fits."""

    change: str
    flags: tuple[str, ...]
    peak: float
    fits: bool


def advise(job: Job, gpu: GPU) -> list[Advice]:
    """Changes in the order to try them, each on top of those before, up to the first that fits."""
    found: list[Advice] = []
    for change, flags, changed in _changes(job):
        peak = estimate_memory(changed).peak()
        found.append(Advice(change, flags, peak, peak <= available(gpu)))
        if found[-1].fits:
            break
    return found


def _changes(job: Job) -> Iterator[tuple[str, tuple[str, ...], Job]]:
    """Each change that applies, what costs least first, with the job after it and all before it."""
    mixed = ("--fsdp", "--fsdp-amp") if job.autocast else ("--fsdp",)
    sharding = "amp" if job.autocast else "fp32"
    if job.gpus > 1 and job.fsdp == "off":
        job = replace(job, fsdp=sharding)
        yield "shard over the GPUs", mixed, job
    elif job.fsdp == "fp32" and job.autocast:
        job = replace(job, fsdp="amp")
        yield "gather parameters in bf16", ("--fsdp-amp",), job
    if job.hybrid:
        job = replace(job, hybrid=False)
        yield "shard over all nodes, without --fsdp-hybrid", (), job
    local = gcd(job.moe.num_experts, gcd(job.local_gpus, job.span)) if job.moe.num_experts else 1
    if local > job.expert_parallel == 1:
        job = replace(job, expert_parallel=local)
        yield "split the experts over the GPUs of a node", ("--expert-parallel", str(local)), job
    while job.sequences % 2 == 0:
        job = replace(job, accum_freq=job.accum_freq * 2)
        yield f"micro-batches of {job.sequences}", ("--accum-freq", str(job.accum_freq)), job
    if job.moe.num_experts and job.checkpointing == "off":
        job = replace(job, checkpointing="experts")
        flags = ("--grad-checkpointing", "--grad-checkpointing-scope", "experts")
        yield "recompute the experts' hidden rows", flags, job
    if job.checkpointing != "block":
        job = replace(job, checkpointing="block")
        yield "recompute whole blocks", ("--grad-checkpointing", "--grad-checkpointing-scope", "block"), job
    for factor in (2, 4, 8):
        gpus, accum_freq = job.gpus * factor, max(job.accum_freq // factor, 1)
        try:
            more = replace(job, gpus=gpus, accum_freq=accum_freq, fsdp=sharding if job.fsdp == "off" else job.fsdp)
        except UserError:
            continue  # the batch does not divide into so many
        flags = mixed if job.fsdp == "off" else ()
        yield f"{gpus} GPUs", (*flags, "--gpus", str(gpus), "--accum-freq", str(accum_freq)), more
