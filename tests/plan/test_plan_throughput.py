"""Collectives and step time against closed forms worked out by hand, and the published table beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from openlm_moe import MoEConfig, UserError
from openlm_moe.hosts.builtin.count import count_parameters, flops_per_token
from openlm_moe.hosts.builtin.params import ModelParams, load_model_params
from openlm_moe.plan.communication import collectives
from openlm_moe.plan.comparison import REACHED, comparison, reached
from openlm_moe.plan.gpus import GPUS, find_gpu
from openlm_moe.plan.job import Job
from openlm_moe.plan.published import MODELS
from openlm_moe.plan.throughput import estimate_step, model_parts

SHAPE = ModelParams(64, 4, 4, 32, 128, model_norm="no_wb_layer_norm")  # every row count divides 16
MOE = MoEConfig(num_experts=8)
A100 = GPUS["A100-80"]


def sent(job: Job) -> dict[str, float]:
    return {c.name: c.sent for c in collectives(job)}


def test_one_gpu_communicates_nothing() -> None:
    assert collectives(Job(SHAPE, MOE)) == []


def test_plain_data_parallel_sums_every_gradient() -> None:
    job = Job(SHAPE, MOE, gpus=8, accum_freq=2)
    total = count_parameters(SHAPE, MOE).total
    assert sum(sent(job).values()) == pytest.approx(2 * 2 * 4 * total * 7 / 8)  # ring, 2 micro-batches, fp32
    assert {c.kind for c in collectives(job)} == {"all-reduce"}


def test_fsdp_gathers_blocks_twice_and_the_ends_once() -> None:
    moe = MoEConfig(num_experts=16)
    job, count = Job(SHAPE, moe, gpus=16, fsdp="amp"), count_parameters(SHAPE, moe)
    moved = sent(job)
    twice, once = count.attention + count.dense_ffn, count.head + count.embedding
    assert moved["all-gather of dense"] == pytest.approx((2 * twice * 2 + once * 2 + count.router * 4) * 15 / 16)
    assert moved["all-gather of experts"] == pytest.approx(2 * count.experts * 2 * 15 / 16)
    assert moved["gradients of experts"] == pytest.approx(count.experts * 4 * 15 / 16)
    kept = sent(replace(job, reshard_after_forward=False))
    assert kept["all-gather of experts"] == moved["all-gather of experts"] / 2
    assert sent(replace(job, fsdp="pure_bf16"))["gradients of experts"] == moved["gradients of experts"] / 2


def test_expert_parallelism_trades_gathers_for_rows() -> None:
    job, count = Job(SHAPE, MOE, gpus=16, fsdp="amp", expert_parallel=8), count_parameters(SHAPE, MOE)
    moved, rows, layers = sent(job), job.tokens * 2, 2
    assert moved["all-gather of experts"] == pytest.approx(2 * count.experts / 8 * 2 * 1 / 2)
    # Results go back in bf16, in forward and as gradients in backward.
    assert moved["all-to-all: results of the experts"] == pytest.approx(layers * 2 * rows * 64 * 2 * 7 / 8)
    recomputed = sent(replace(job, checkpointing="block"))
    assert recomputed["all-to-all: results of the experts"] == pytest.approx(layers * 3 * rows * 64 * 2 * 7 / 8)
    only_experts = sent(replace(job, checkpointing="experts"))
    assert only_experts["all-to-all: results of the experts"] == moved["all-to-all: results of the experts"]


def test_hybrid_shards_inside_nodes_and_sums_between_them() -> None:
    job, count = Job(SHAPE, MOE, gpus=16, fsdp="amp", hybrid=True), count_parameters(SHAPE, MOE)
    by_name = {c.name: c for c in collectives(job)}
    assert by_name["all-gather of experts"].ranks == 8 and not by_name["all-gather of experts"].crosses_nodes
    between = by_name["gradients of experts over replicas"]
    assert between.ranks == 2 and between.crosses_nodes
    assert between.sent == pytest.approx(2 * count.experts / 8 * 4 / 2)


def test_nodes_are_slower_than_links() -> None:
    inside = Job(load_model_params("open_lm_160m"), MOE, gpus=8, fsdp="amp")
    across = replace(inside, gpus=16, global_batch_size=128)
    ratio = estimate_step(across, A100).sharding / estimate_step(inside, A100).sharding
    # 8 adapters of 25 GB/s a node against links of 300 GB/s, and 15/16 of the bytes instead of 7/8
    assert ratio == pytest.approx(300 / 200 * (15 / 16) / (7 / 8), rel=0.01)


def test_a_large_model_is_bound_by_arithmetic_at_its_active_flops() -> None:
    job = Job(load_model_params("open_lm_7b"), MOE, gpus=8, fsdp="amp", accum_freq=8, global_batch_size=1024)
    step = estimate_step(job, A100)
    assert step.bound == "arithmetic"
    assert step.arithmetic == pytest.approx(flops_per_token(job.params, MOE) * job.tokens * 8 / A100.bf16_flops)
    assert 0.8 < step.mfu(job, A100) < 1
    assert step.tokens_per_second_per_gpu == pytest.approx(job.global_batch_size * 2048 / 8 / step.total)
    recomputing = estimate_step(replace(job, checkpointing="block"), A100)
    assert recomputing.arithmetic == pytest.approx(step.arithmetic * 4 / 3, rel=0.02)
    assert recomputing.flops == step.flops  # recomputation is no useful work


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"network": 0.5e9}, "FSDP's collectives"),
        ({"bandwidth": 50e9}, "memory bandwidth"),
        ({"link": 1e9}, "all-to-all"),
        ({"bf16_flops": 5e12}, "arithmetic"),
        ({"bf16_flops": 1e18, "bandwidth": 1e15, "link": 1e15, "network": 1e15}, "kernel launches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_scarce_bounds(change: dict[str, float], bound: str) -> None:
    job = Job(
        load_model_params("open_lm_830m"),
        MOE,
        gpus=16,
        fsdp="amp",
        expert_parallel=8,
        global_batch_size=64,
        accum_freq=2,
    )
    if bound == "all-to-all":
        job = replace(job, gpus=8, global_batch_size=1024)
    assert estimate_step(job, replace(A100, **change)).bound == bound


def test_parts_hold_all_active_flops() -> None:
    job = Job(load_model_params("open_lm_160m"), MOE, global_batch_size=8)
    total = sum(part.flops for part in model_parts(job))
    assert total == pytest.approx(flops_per_token(job.params, MOE) * job.tokens)


def test_gpus() -> None:
    assert list(GPUS) == ["A100-40", "A100-80", "H100", "H200", "B200", "MI300X"]
    assert find_gpu("h200") is GPUS["H200"]
    assert all(gpu.source and gpu.memory > 30e9 and gpu.bf16_flops > gpu.fp32_flops for gpu in GPUS.values())
    with pytest.raises(UserError, match="A100-40, A100-80, H100, H200, B200, MI300X"):
        find_gpu("V100")


def test_published_runs_stay_below_the_bound() -> None:
    dense = [reached(model, 0) for model in MODELS]
    moe = [reached(model, 8) for model in MODELS]
    assert all(share < 1 for share in dense + moe)
    assert (round(min(dense), 2), round(max(dense), 2)) == REACHED
    assert moe[0] == min(moe)  # what the record says of the smallest model


def test_the_record_is_current(repo_root: Path) -> None:
    record = repo_root / "results" / "plan" / "throughput.md"
    assert record.read_text() == comparison(), f"python -m openlm_moe.plan --published > {record}"
