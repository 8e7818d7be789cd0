"""What the sweep's records say: of each arm of a size, the runs that count, which are those at its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import records
from results.sweep_queue import RECORDS_FILE, Run, finished, read_queue, stage_runs, tuning_losses

Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """The runs of one arm at one size and number of tokens; `tried` of the `rates` learning rates have a record."""

    name: str
    what: str
    lr: float | None  # that all runs here have; None before anything was run
    tried: int
    rates: int
    runs: dict[int, Record] = field(default_factory=dict)  # by seed

    @property
    def perplexities(self) -> list[float]:
        return [perplexity(self.runs[seed]) for seed in sorted(self.runs)]

    @property
    def dropped(self) -> float:
        """Share of routed rows that were dropped in training, the mean over seeds."""
        return sum(r["dropped"] for r in self.runs.values()) / len(self.runs)

    @property
    def any_run(self) -> Record | None:
        return next(iter(self.runs.values()), None)


class Sweep:
    """The queue, and the records of the runs in it."""

    def __init__(self, path: Path = RECORDS_FILE) -> None:
        self.queue = read_queue()
        self.records = records.read(path)
        self.done = finished(self.records)

    def sizes(self) -> list[str]:
        return list(self.queue["sizes"])

    def ladder_tokens(self, size: str) -> int:
        """Tokens that each run of the ladder of `size` is trained on."""
        return next(s["tokens"] for s in self.queue["stages"] if s["name"] == "ladder" and s["size"] == size)

    def ladder_arms(self, size: str) -> list[str]:
        """The arms whose learning rates are tuned, in the queue's order of arms."""
        tuned = {arm for stage in self._tuning(size) for arm in stage["arms"]}
        return [arm for arm in self.queue["arms"] if arm in tuned]

    def arm(self, size: str, name: str, tokens: int | None = None) -> Arm:
        """The runs of an arm at its learning rate, or at the best of those tried so far."""
        ladder = self.ladder_tokens(size)
        tried = tuning_losses(size, self._tuner(size, name), self.queue, self.done)
        lr = min(tried, key=lambda rate: tried[rate], default=None)
        runs = {
            run.seed: record
            for run, record in self.done.items()
            if (run.size, run.arm, run.tokens, run.lr) == (size, name, tokens or ladder, lr)
            and record["valid_loss"] is not None
        }
        rates = self.queue["learning_rates"][size]
        return Arm(name, self.queue["arms"][name]["what"], lr, len(tried), len(rates), runs)

    def progress(self) -> list[tuple[dict[str, Any], int, int]]:
        """(stage, runs that have a record, runs in all) of every stage of the queue."""
        out = []
        for stage in self.queue["stages"]:
            rates = len(self.queue["learning_rates"][stage["size"]]) if stage["lr"] == "all" else 1
            done = sum(run in self.done for run in stage_runs(stage, self.queue, self.done))
            out.append((stage, done, rates * len(stage["arms"]) * len(stage["seeds"])))
        return out

    def distinct(self) -> tuple[int, int]:
        """(runs of the queue that have a record, runs in all), each counted once.

        A run whose rate is not tuned yet stands for itself: no other stage of the queue asks for its seed.
        """
        asked: set[object] = set()
        for stage in self.queue["stages"]:
            found = list(stage_runs(stage, self.queue, self.done))
            asked.update(found)
            settled = {run.arm for run in found}
            open_ = [arm for arm in stage["arms"] if arm not in settled]
            asked.update((stage["size"], stage["tokens"], arm, seed) for arm in open_ for seed in stage["seeds"])
        return sum(run in self.done for run in asked if isinstance(run, Run)), len(asked)

    def _tuning(self, size: str) -> list[dict[str, Any]]:
        return [s for s in self.queue["stages"] if s["size"] == size and s["lr"] == "all"]

    def _tuner(self, size: str, name: str) -> str:
        """The arm whose tuned rate `name` is run at: itself, or the one that its stage names."""
        if any(name in stage["arms"] for stage in self._tuning(size)):
            return name
        stages = self.queue["stages"]
        return next(s["lr"] for s in stages if s["size"] == size and name in s["arms"])


def perplexity(record: Record) -> float:
    return math.exp(record["valid_loss"])


def ratios(a: Arm, b: Arm) -> list[float]:
    """Perplexity of `a` over that of `b`, of the seeds that both have."""
    return [perplexity(a.runs[seed]) / perplexity(b.runs[seed]) for seed in sorted(a.runs.keys() & b.runs.keys())]


def load_curve(record: Record) -> list[tuple[float, float]]:
    """[(tokens, rows of the busiest expert over the mean, of the worst layer)] of the logged steps."""
    curves = [values for name, values in record["load"].items() if name.endswith("/max_over_mean")]
    return [(points[0][0], max(value for _, value in points)) for points in zip(*curves, strict=True)]
