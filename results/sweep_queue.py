"""The queue file as runs: which there are, which of them have a record, and what the tuned learning rates are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from results.records import RESULTS

QUEUE_FILE = RESULTS / "sweep_queue.json"
RECORDS_FILE = RESULTS / "sweep.jsonl"
VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Run:
    """One training run; the same in two stages of the queue is run once."""

    size: str
    arm: str
    lr: float
    seed: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.size}_{self.arm}_lr{self.lr:g}_seed{self.seed}_{self.tokens}"


def read_queue() -> dict[str, Any]:
    """The queue file: budget, sizes, arms, and stages in the order in which they are run."""
    return json.loads(QUEUE_FILE.read_text())


def finished(records: Iterable[dict[str, Any]]) -> dict[Run, dict[str, Any]]:
    """Each run's record. A run that diverged has one too, without a loss."""
    names = Run.__dataclass_fields__
    return {Run(**{name: record[name] for name in names}): record for record in records}


def stage_runs(stage: dict[str, Any], queue: dict[str, Any], done: dict[Run, dict[str, Any]]) -> Iterator[Run]:
    """The runs of one stage; those whose learning rate is not tuned yet are left out."""
    for arm in stage["arms"]:
        for seed in stage["seeds"]:
            for lr in _learning_rates(stage, arm, queue, done):
                yield Run(stage["size"], arm, lr, seed, stage["tokens"])


def _learning_rates(stage: dict[str, Any], arm: str, queue: dict[str, Any], done: dict[Run, Any]) -> list[float]:
    if stage["lr"] == "all":
        return queue["learning_rates"][stage["size"]]
    best = tuned_lr(stage["size"], arm if stage["lr"] == "tuned" else stage["lr"], queue, done)
    return [] if best is None else [best]


def tuned_lr(size: str, arm: str, queue: dict[str, Any], done: dict[Run, dict[str, Any]]) -> float | None:
    """The learning rate of the lowest validation loss at seed 0; None until every rate has been tried."""
    losses = tuning_losses(size, arm, queue, done)
    return min(losses, key=lambda lr: losses[lr]) if len(losses) == len(queue["learning_rates"][size]) else None


def tuning_losses(size: str, arm: str, queue: dict[str, Any], done: dict[Run, dict[str, Any]]) -> dict[float, float]:
    """{learning rate tried so far: validation loss at seed 0}; that of a run that diverged is infinite."""
    tokens = next(s["tokens"] for s in queue["stages"] if s["size"] == size and s["lr"] == "all" and arm in s["arms"])
    found = {lr: done.get(Run(size, arm, lr, 0, tokens)) for lr in queue["learning_rates"][size]}
    return {
        lr: math.inf if record["valid_loss"] is None else record["valid_loss"]
        for lr, record in found.items()
        if record is not None
    }


def model_values(size: dict[str, Any]) -> dict[str, Any]:
    """The model's JSON, in open_lm's schema."""
    shape = {key: value for key, value in size.items() if key != "corpus"}
    return {
        **shape,
        "vocab_size": VOCAB_SIZE,
        "weight_tying": True,
        "model_norm": "gain_only_layer_norm",
        "qk_norm": True,
    }


def flags(run: Run, queue: dict[str, Any]) -> dict[str, Any]:
    """The trainer's flags that make the run what it is; `8d` stands for 8 times the model's dim."""
    chosen = {**queue["common"], **queue["arms"][run.arm]["flags"]}
    dim = queue["sizes"][run.size]["hidden_dim"]
    for flag, value in chosen.items():
        if isinstance(value, str) and value[:-1].isdigit() and value.endswith("d"):
            chosen[flag] = int(value[:-1]) * dim
    return {
        **chosen,
        "--lr": run.lr,
        "--lr-cooldown-end": run.lr / 50,
        "--seed": run.seed,
        "--train-num-samples": run.tokens,
    }


def as_record(run: Run) -> dict[str, Any]:
    """The run's fields, as they begin its record."""
    return asdict(run)
