"""Meters give values that can be worked out by hand."""

from __future__ import annotations

import math
import time

import pytest
import torch

from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.meters import StepMeter, expert_load, expert_loads, perplexity
from openlm_moe.telemetry.peaks import peak_flops


class Clock:
    """Stands in for time.perf_counter; moves only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_step_meter_means_rates_and_mfu(clock: Clock) -> None:
    meter = StepMeter(world_size=2, flops_per_token=6e6, peak_flops=1e10)
    for seconds in (1.0, 3.0):
        with meter.phase(metrics.FORWARD_TIME):
            clock.now += seconds
        meter.step(tokens=500)
    with meter.paused():
        clock.now += 50
    got = meter.collect(total_tokens=7000)
    assert got[metrics.FORWARD_TIME] == 2.0
    assert got[metrics.BACKWARD_TIME] == 0.0
    assert got[metrics.BATCH_TIME] == 2.0
    assert got[metrics.TOKENS_PER_SECOND] == 250.0
    assert got[metrics.TOKENS_PER_SECOND_PER_GPU] == 125.0
    assert got[metrics.ACTIVE_FLOPS] == 6e6 * 7000
    assert got[metrics.MFU] == pytest.approx(6e6 * 250 / 2e10)
    assert got[metrics.TRAIN_TOKENS] == 7000
    assert got[metrics.PEAK_MEMORY] > 0


def test_collect_starts_the_next_interval(clock: Clock) -> None:
    meter = StepMeter()
    with meter.phase(metrics.DATA_TIME):
        clock.now += 5
    meter.step(tokens=10)
    meter.collect(10)
    clock.now += 2
    meter.step(tokens=10)
    got = meter.collect(20)
    assert got[metrics.DATA_TIME] == 0.0
    assert got[metrics.TOKENS_PER_SECOND] == 5.0


def test_progress_goes_with_every_row_that_is_drawn_over_it() -> None:
    assert StepMeter(flops_per_token=6e6).progress(500) == {metrics.TRAIN_TOKENS: 500, metrics.ACTIVE_FLOPS: 3e9}
    assert StepMeter().progress(500) == {metrics.TRAIN_TOKENS: 500}


def test_no_mfu_where_the_peak_is_unknown(clock: Clock) -> None:
    meter = StepMeter(flops_per_token=1.0, peak_flops=None)
    clock.now += 1
    meter.step(tokens=1)
    assert metrics.MFU not in meter.collect(1)
    assert metrics.ACTIVE_FLOPS not in StepMeter(flops_per_token=None, peak_flops=1e12).collect(1)


def test_peak_flops() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert peak_flops("Some CPU", torch.float32) is None


def test_perplexity() -> None:
    assert perplexity(math.log(42)) == pytest.approx(42)
    assert perplexity(1e4) == math.inf


def test_expert_load_of_known_counts() -> None:
    got = expert_load(3, torch.tensor([6, 2, 0, 0]))
    prefix = "experts/layer_3/"
    assert got[prefix + "load"] == [0.75, 0.25, 0, 0]
    assert got[prefix + "max_over_mean"] == 3.0
    assert got[prefix + "min_over_mean"] == 0.0
    assert got[prefix + "max_violation"] == 2.0
    assert got[prefix + "std_over_mean"] == pytest.approx(math.sqrt((4 + 0 + 1 + 1) / 4))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert got[prefix + "entropy"] == pytest.approx(entropy)


@pytest.mark.parametrize("counts", [[5, 5, 5, 5], [0, 0, 0, 0], [9]])
def test_even_load(counts: list[int]) -> None:
    got = expert_load(0, counts)
    assert got["experts/layer_0/max_over_mean"] == got["experts/layer_0/min_over_mean"] == 1.0
    assert got["experts/layer_0/entropy"] == pytest.approx(1.0)
    assert sum(got["experts/layer_0/load"]) == pytest.approx(1.0)


def test_collapsed_layer_has_zero_entropy() -> None:
    assert expert_load(0, [0, 7])["experts/layer_0/entropy"] == 0.0


@pytest.mark.parametrize("layer_ids", [(0, 1, 2, 3), (0, 2)])
def test_every_moe_layer_is_reported_and_the_worst_stands_for_the_model(layer_ids: tuple[int, ...]) -> None:
    got = expert_loads({i: [1, 1 + i] for i in layer_ids})
    for i in layer_ids:
        for what in metrics.LAYER_METRICS:
            assert metrics.layer_metric(i, what) in got
    worst = max(layer_ids)
    assert got[metrics.MAX_VIOLATION] == pytest.approx(2 * (1 + worst) / (2 + worst) - 1)
    assert len(got) == len(layer_ids) * len(metrics.LAYER_METRICS) + 1


def test_dense_model_reports_no_experts() -> None:
    assert expert_loads({}) == {}
