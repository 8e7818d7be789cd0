"""What a training loop measures between two log lines: phase times, throughput, MFU, memory, expert load."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from openlm_moe.telemetry import metrics

PHASES = (
    metrics.DATA_TIME,
    metrics.FORWARD_TIME,
    metrics.BACKWARD_TIME,
    metrics.OPTIM_STEP_TIME,
    metrics.SYNC_TIME,
)


def perplexity(loss: float) -> float:
    """exp(loss); infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class StepMeter:
    """Accumulates phase times and tokens over the steps of one log interval.

    flops_per_token: forward and backward FLOPs of the active parameters for one token, None if unknown.
    peak_flops: FLOP/s of one device (`peaks.peak_flops`), None if unknown; then there is no MFU.

        with meter.phase(metrics.FORWARD_TIME): ...
        meter.step(tokens=global_batch_tokens)
        values = meter.collect(total_tokens)      # every log interval; starts the next one
    """

    def __init__(
        self,
        world_size: int = 1,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.world_size = world_size
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.device = torch.device(device)
        self._restart()

    def _restart(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        self._tokens = 0
        self._paused = 0.0
        self._start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to phase `name`, one of PHASES: host time, running kernels are not waited for."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps the time spent inside (evaluation, checkpoints, sampling) out of step times and throughput."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def step(self, tokens: int) -> None:
        """One optimizer step over `tokens` tokens of all ranks is done."""
        self._steps += 1
        self._tokens += tokens

    def collect(self, total_tokens: int) -> dict[str, float]:
        """Means per step since the last call, throughput, MFU, memory; `total_tokens` is the run's so far."""
        elapsed = max(time.perf_counter() - self._start - self._paused, 1e-9)
        steps = max(self._steps, 1)
        rate = self._tokens / elapsed
        out = {name: seconds / steps for name, seconds in self._seconds.items()}
        out[metrics.BATCH_TIME] = elapsed / steps
        out[metrics.TOKENS_PER_SECOND] = rate
        out[metrics.TOKENS_PER_SECOND_PER_GPU] = rate / self.world_size
        out[metrics.PEAK_MEMORY] = peak_memory(self.device)
        out |= self.progress(total_tokens)
        if self.flops_per_token is not None and self.peak_flops is not None:
            out[metrics.MFU] = self.flops_per_token * rate / (self.world_size * self.peak_flops)
        self._restart()
        return out

    def progress(self, total_tokens: int) -> dict[str, float]:
        """How far the run is, in tokens and active FLOPs. wandb needs it in each row that is drawn over them."""
        out: dict[str, float] = {metrics.TRAIN_TOKENS: total_tokens}
        if self.flops_per_token is not None:
            out[metrics.ACTIVE_FLOPS] = self.flops_per_token * total_tokens
        return out


def peak_memory(device: torch.device) -> float:
    """GiB: highest memory allocated on a CUDA device since the counter was reset; highest resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on every platform that torch runs on
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def expert_load(layer_id: int, tokens_per_expert: Sequence[float] | torch.Tensor) -> dict[str, Any]:
    """Load metrics of one MoE layer from the number of tokens (routed slots) each expert got, summed over ranks.

    A layer that routed nothing (all counts 0) counts as even: it has no imbalance to report.
    """
    counts = [float(n) for n in torch.as_tensor(tokens_per_expert).tolist()]
    total, num_experts = sum(counts), len(counts)
    shares = [n / total for n in counts] if total > 0 else [1 / num_experts] * num_experts
    relative = [share * num_experts for share in shares]
    entropy = -sum(p * math.log(p) for p in shares if p > 0)
    values = {
        "max_over_mean": max(relative),
        "min_over_mean": min(relative),
        "std_over_mean": math.sqrt(sum((r - 1) ** 2 for r in relative) / num_experts),
        "max_violation": max(relative) - 1,
        "entropy": entropy / math.log(num_experts) if num_experts > 1 else 1.0,
        "load": shares,
    }
    return {metrics.layer_metric(layer_id, what): value for what, value in values.items()}


def expert_loads(per_layer: Mapping[int, Sequence[float] | torch.Tensor]) -> dict[str, Any]:
    """`expert_load` of every layer ({layer id: tokens per expert}), and the largest violation over them."""
    out: dict[str, Any] = {}
    for layer_id, counts in sorted(per_layer.items()):
        out |= expert_load(layer_id, counts)
    if per_layer:
        out[metrics.MAX_VIOLATION] = max(out[metrics.layer_metric(i, "max_violation")] for i in per_layer)
    return out
