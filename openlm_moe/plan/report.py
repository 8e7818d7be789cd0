"""A plan as plain values, for JSON and for other tools, and as text for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from openlm_moe.hosts.builtin.count import count_parameters, flops_per_token, short_count
from openlm_moe.plan.advice import advise
from openlm_moe.plan.communication import collectives
from openlm_moe.plan.comparison import REACHED
from openlm_moe.plan.gpus import GPU
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import available, estimate_memory
from openlm_moe.plan.throughput import estimate_step

GIB = 2**30


def as_dict(job: Job, gpu: GPU, placed: bool) -> dict[str, Any]:
    """Everything about `job`. Without a placement on GPUs (`placed`), what does not depend on one."""
    count = count_parameters(job.params, job.moe)
    plan: dict[str, Any] = {
        "model": job.params.to_json(),
        "moe": job.moe.to_dict(),
        "parameters": {
            "training": count.total,
            "active": count.active,
            **{name: value for name, value in asdict(count).items() if name != "top_k_share"},
        },
        "flops_per_token": flops_per_token(job.params, job.moe),
    }
    if not placed:
        return plan
    memory, step, moving = estimate_memory(job), estimate_step(job, gpu), collectives(job)
    plan["job"] = {
        "gpus": job.gpus,
        "nodes": job.nodes,
        "gpu": asdict(gpu),
        "global_batch_size": job.global_batch_size,
        "accum_freq": job.accum_freq,
        "sequences_per_micro_batch": job.sequences,
        "seq_len": job.params.seq_len,
        "precision": job.precision,
        "fsdp": job.fsdp,
        "hybrid": job.hybrid,
        "expert_parallel": job.expert_parallel,
        "checkpointing": job.checkpointing,
    }
    plan["memory_bytes"] = {
        **asdict(memory),
        "saved_activations": memory.saved,
        "peak": memory.peak(),
        "peak_worst_routing": memory.peak(worst=True),
        "available": available(gpu),
    }
    plan["communication"] = [{**asdict(c), "sent": c.sent, "seconds": c.seconds(gpu, job)} for c in moving]
    plan["step"] = {
        "seconds": step.total,
        "parts": step.parts,
        "optimizer": step.optimizer,
        "sharding": step.sharding,
        "all_to_all": step.all_to_all,
        "host": step.host,
        "bound_by": step.bound,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "mfu": step.mfu(job, gpu),
    }
    plan["fits"] = memory.fits(gpu)
    plan["fits_worst_routing"] = memory.fits(gpu, worst=True)
    plan["advice"] = [asdict(advice) for advice in advise(job, gpu)] if not memory.fits(gpu) else []
    return plan


def as_text(plan: dict[str, Any]) -> str:
    """The plan for people."""
    numbers = plan["parameters"]
    lines = [
        f"parameters   {short_count(numbers['training'])} training / {short_count(numbers['active'])} active"
        f" (top-{plan['moe']['top_k']})"
        if plan["moe"]["num_experts"]
        else f"parameters   {short_count(numbers['training'])} (dense)",
        "             "
        + ", ".join(
            f"{name.replace('_', ' ')} {short_count(value)}"
            for name, value in numbers.items()
            if name not in ("training", "active") and value
        ),
        f"FLOPs        {plan['flops_per_token'] / 1e9:.3g} GFLOP per token, forward and backward",
    ]
    if "job" in plan:
        lines += [*_job_lines(plan), *_memory_lines(plan), *_communication_lines(plan), *_step_lines(plan)]
        lines += _verdict_lines(plan)
    return "\n".join(lines)


def _job_lines(plan: dict[str, Any]) -> list[str]:
    job = plan["job"]
    sharding = {"off": "no FSDP", "fp32": "FSDP", "amp": "FSDP amp", "pure_bf16": "FSDP pure bf16"}[job["fsdp"]]
    nodes = f"{job['nodes']} node{'s' * (job['nodes'] > 1)}"
    return [
        f"job          {job['gpus']} x {job['gpu']['name']} on {nodes}, {sharding}"
        f"{', hybrid' if job['hybrid'] else ''}, expert parallel {job['expert_parallel']}, {job['precision']}, "
        f"recomputing {'nothing' if job['checkpointing'] == 'off' else job['checkpointing']}",
        f"batch        {job['global_batch_size']} sequences of {job['seq_len']}: {job['gpus']} GPUs x "
        f"{job['accum_freq']} micro-batches x {job['sequences_per_micro_batch']}",
    ]


def _memory_lines(plan: dict[str, Any]) -> list[str]:
    memory = plan["memory_bytes"]
    rows = [
        ("weights", memory["weights"]),
        ("gradients", memory["gradients"]),
        ("optimizer", memory["optimizer"]),
        ("saved activations", memory["saved_activations"]),
        *((f"  {name}", value) for name, value in memory["activations"].items()),
        ("gathered by FSDP", memory["gathered"]),
        ("all-to-all buffers", memory["all_to_all"]),
        ("workspace", memory["workspace"]),
        ("peak", memory["peak"]),
        ("peak, worst routing", memory["peak_worst_routing"]),
        ("available", memory["available"]),
    ]
    return ["memory       GiB on the fullest GPU", *(f"  {n:<26}{v / GIB:>9.2f}" for n, v in rows if v)]


def _communication_lines(plan: dict[str, Any]) -> list[str]:
    if not plan["communication"]:
        return []
    lines = ["communication  GB that a GPU sends per step"]
    for c in plan["communication"]:
        where = "between nodes" if c["crosses_nodes"] else "inside nodes"
        lines.append(f"  {c['name']:<36}{c['sent'] / 1e9:>9.3f}  over {c['ranks']} GPUs {where}, {c['calls']} calls")
    return lines


def _step_lines(plan: dict[str, Any]) -> list[str]:
    step = plan["step"]
    rows = [
        *step["parts"].items(),
        ("optimizer", step["optimizer"]),
        ("FSDP's collectives", step["sharding"]),
        ("all-to-all", step["all_to_all"]),
        ("host starts operations", step["host"]),
    ]
    return [
        "step         ms at the makers' peaks (a lower bound)",
        *(f"  {name:<26}{value * 1e3:>9.1f}" for name, value in rows if value),
        f"  {'step':<26}{step['seconds'] * 1e3:>9.1f}  bound by {step['bound_by']}",
        f"throughput   {step['tokens_per_second_per_gpu'] / 1e3:.1f}K tokens/s/GPU at most, MFU {step['mfu']:.1%}; "
        f"open_lm's published dense runs reach {REACHED[0]:.0%} to {REACHED[1]:.0%} of such a bound (--published)",
    ]


def _verdict_lines(plan: dict[str, Any]) -> list[str]:
    if plan["fits"]:
        worst = "" if plan["fits_worst_routing"] else ", but not if every token goes to the experts of one GPU"
        return [f"fits         yes{worst}"]
    lines = ["fits         no; change, one on top of the other:"]
    for advice in plan["advice"]:
        verdict = "fits" if advice["fits"] else "not enough"
        change = f"{advice['change']}  {' '.join(advice['flags'])}"
        lines.append(f"  {change:<76}{advice['peak'] / GIB:>8.1f} GiB, {verdict}")
    return lines
