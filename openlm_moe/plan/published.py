"""The published throughput table of open_lm's MoE beside the roofline, and where they part."""

from __future__ import annotations

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan.gpus import GPUS
from openlm_moe.plan.job import Job
from openlm_moe.plan.throughput import StepTime, estimate_step

SOURCE = "https://github.com/mlfoundations/open_lm/blob/main/MOE.md"
# model -> nodes of 8 A100, thousand tokens/s/GPU dense, and with 8 experts in every other layer
PUBLISHED: dict[str, tuple[int, float, float]] = {
    "open_lm_41m": (1, 141.2, 69.5),
    "open_lm_87m": (1, 106.0, 66.6),
    "open_lm_160m": (1, 95.5, 66.2),
    "open_lm_410m": (2, 30.3, 18.5),
    "open_lm_830m": (4, 16.0, 9.2),
}
SEQUENCES_PER_GPU, ACCUMULATION = 8, 4  # --batch-size 8 --accum-freq 4 in the published command
GPU_NAME = "A100-80"


def published_job(model: str, experts: int) -> Job:
    """The published command for `model`, with our dropless layers in place of MegaBlocks' capacity ones."""
    nodes, _, _ = PUBLISHED[model]
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


def comparison() -> str:
    """A Markdown table of published and bounded throughput."""
    lines = [
        f"Thousand tokens/s/GPU on {GPU_NAME}: published ({SOURCE}) and the roofline's bound.",
        "",
        "| model | experts | published | bound | published / bound | bound by |",
        "|---|---|---|---|---|---|",
    ]
    ratios = []
    for model, (_, dense, moe) in PUBLISHED.items():
        rates = []
        for experts, measured in ((1, dense), (8, moe)):
            step = estimated_step(model, 0 if experts == 1 else experts)
            bound = step.tokens_per_second_per_gpu / 1e3
            rates.append(bound)
            lines.append(
                f"| {model} | {experts} | {measured:.1f} | {bound:.1f} | {measured / bound:.2f} | {step.bound} |"
            )
        ratios.append(f"| {model} | {moe / dense:.2f} | {rates[1] / rates[0]:.2f} |")
    lines += ["", "| model | MoE / dense published | MoE / dense bound |", "|---|---|---|", *ratios]
    return "\n".join(lines)
