"""Runs with the shape of real ones, made by the sinks themselves: losses fall, experts even out, values are known."""

from __future__ import annotations

import contextlib
import io
import math
import random
from pathlib import Path

from openlm_moe.config import MoEConfig
from openlm_moe.telemetry import Sinks, expert_loads, perplexity

TOKENS_PER_STEP = 8192


def make_run(
    folder: Path, experts: int, layers: tuple[int, ...] = (0, 2, 4), steps: int = 300, floor: float = 3.8
) -> Path:
    """Logs every step of a run whose last training loss is about `floor` nats, with three evaluations."""
    folder.mkdir(parents=True)
    draw = random.Random(experts)
    flops = 2.4e7
    with contextlib.redirect_stdout(io.StringIO()), Sinks(folder) as sinks:
        moe = MoEConfig(num_experts=experts, top_k=2 if experts else 1, layers=layers).to_dict()
        counts = {"total": 3_200_000 + 400_000 * experts, "active": 3_200_000}
        sinks.config({"model": "open_lm_11m", "moe": moe, "world_size": 2, "device": "cpu", "parameters": counts})
        for step in range(1, steps + 1):
            done, tokens = step / steps, step * TOKENS_PER_STEP
            loss = floor + 4.5 * math.exp(-7 * done) + draw.gauss(0, 0.03)
            rate = 9000 + draw.gauss(0, 300) - 10 * experts
            values = {
                "train/loss": loss,
                "train/perplexity": perplexity(loss),
                "train/lr": 1e-3 * min(step / 30, 1) * (0.5 + 0.5 * math.cos(math.pi * done)),
                "train/grad_norm": 0.6 + 3 * math.exp(-20 * done) + abs(draw.gauss(0, 0.05)),
                "train/samples_per_second": rate,
                "train/samples_per_second_per_gpu": rate / 2,
                "train/mfu": 0.3 + draw.gauss(0, 0.01),
                "train/active_flops": flops * tokens,
                "train/peak_memory": 1.2 + experts / 40,
            }
            if experts:
                values |= {"train/load_balancing_loss": 0.1 + 0.08 * math.exp(-9 * done), "train/dropped_fraction": 0.0}
                values |= expert_loads({i: _counts(draw, experts, i, done) for i in layers})
            sinks._opened -= 4.0  # as if each step had taken four seconds
            sinks.log(values, step, tokens)
            if step % (steps // 3) == 0:
                valid = loss + 0.1
                sinks.log({"valid/stdlib/loss": valid, "valid/stdlib/perplexity": perplexity(valid)}, step, tokens)
    return folder


def _counts(draw: random.Random, experts: int, layer: int, done: float) -> list[float]:
    favourite = layer % experts
    skew = 6 * math.exp(-8 * done)
    return [1000 * (1 + (skew if e == favourite else 0)) * math.exp(draw.gauss(0, 0.35)) for e in range(experts)]
