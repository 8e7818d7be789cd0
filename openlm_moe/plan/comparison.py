"""The published throughput of open_lm's MoE beside the roofline, and where they part."""

from __future__ import annotations

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan import published
from openlm_moe.plan.gpus import GPUS
from openlm_moe.plan.job import Job
from openlm_moe.plan.throughput import StepTime, estimate_step

SEQUENCES_PER_GPU, ACCUMULATION = 8, 4  # --batch-size 8 --accum-freq 4 in the published command
GPU_NAME = "A100-80"


def published_job(model: str, experts: int) -> Job:
    """The published command for `model`, with our dropless layers in place of MegaBlocks' capacity ones."""
    nodes = published.MODELS[model]["nodes"]
    return Job(
        params=load_model_params(model, {"model_norm": "gain_only_layer_norm"}),
        moe=MoEConfig(num_experts=experts),
        gpus=8 * nodes,
        global_batch_size=8 * nodes * SEQUENCES_PER_GPU,
        accum_freq=ACCUMULATION,
        fsdp="amp",
    )


def estimated_step(model: str, experts: int) -> StepTime:
    """The roofline's step time for `published_job`."""
    return estimate_step(published_job(model, experts), GPUS[GPU_NAME])


# Share of the bound that the published dense runs reach: what to expect of a careful implementation. A test keeps it.
REACHED = (0.30, 0.44)


def reached(model: str, experts: int) -> float:
    """Published throughput over the roofline's bound."""
    return published.throughput(model, experts) * 1e3 / estimated_step(model, experts).tokens_per_second_per_gpu


def comparison() -> str:
    """Published and bounded throughput side by side, in Markdown, with what the difference says."""
    steps = {(model, e): estimated_step(model, e) for model in published.MODELS for e in (0, 8)}
    shares = {(model, e): reached(model, e) for model, e in steps}
    lines = [
        f"Thousand tokens/s/GPU on {GPU_NAME}: published by open_lm ({published.SOURCE}), "
        "and the roofline of `openlm_moe.plan`.",
        "",
        "| model | experts | published | bound | published / bound | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for (model, experts), step in steps.items():
        told, bound = published.throughput(model, experts), step.tokens_per_second_per_gpu / 1e3
        share = shares[model, experts]
        lines.append(f"| {model} | {experts or 1} | {told:.1f} | {bound:.1f} | {share:.2f} | {step.bound} |")
    lines += ["", "| model | MoE / dense published | MoE / dense bound |", "|---|---|---|"]
    for model in published.MODELS:
        bounds = [steps[model, e].tokens_per_second_per_gpu for e in (0, 8)]
        lines.append(f"| {model} | {published.throughput_ratio(model):.2f} | {bounds[1] / bounds[0]:.2f} |")
    low, high = ([f(shares[model, e] for model in published.MODELS) for e in (0, 8)] for f in (min, max))
    furthest = min(published.MODELS, key=lambda model: shares[model, 8])
    lines += [
        "",
        "Where it is off. The roofline is a bound, not a forecast: every operation runs at the maker's peak or at full",
        "memory bandwidth, and only FSDP's traffic that computation cannot hide costs time. The published dense runs",
        f"reach {low[0]:.2f} to {high[0]:.2f} of it, those with 8 experts {low[1]:.2f} to {high[1]:.2f}; {furthest} is",
        "furthest away, probably because its operations are short and what the roofline leaves out (data loading, host",
        "work beyond launches, gaps between kernels) weighs most there. The published MoE is also another computation",
        "than the bound's: expert capacity 1.25 computes a quarter more rows, padding included, with MegaBlocks'",
        "kernels, where dropless layers compute the routed rows alone.",
    ]
    return "\n".join(lines) + "\n"
