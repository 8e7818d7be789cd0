"""A tiny model and tiny data, and runs of the trainer on them, in this process or under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openlm_moe.data.manifest import write_manifest
from openlm_moe.data.shards import write_shard
from openlm_moe.main import main

SEQ_LEN, VOCAB = 16, 64
MODEL = {"hidden_dim": 16, "n_layers": 2, "n_heads": 2, "seq_len": SEQ_LEN, "vocab_size": VOCAB}


def write_source(
    folder: Path, shards: int, samples: int, seed: int, length: int = SEQ_LEN + 1, bad: tuple[int, int] | None = None
) -> Path:
    """Shards of arithmetic sequences (learnable) with a random start, and their manifest; returns the manifest.

    `bad`: the shard and the number in it of a sample that holds a token beyond the vocabulary.
    """
    rng = np.random.default_rng(seed)
    entries = []
    for number in range(shards):
        starts, strides = rng.integers(0, VOCAB, samples), rng.integers(1, 4, samples)
        rows = (starts[:, None] + strides[:, None] * np.arange(length)) % VOCAB
        if bad is not None and bad[0] == number:
            rows[bad[1]] = VOCAB
        write_shard(folder / f"{number:08d}.tar", rows)
        entries.append((f"{number:08d}", samples))
    write_manifest(folder / "manifest.jsonl", entries)
    return folder / "manifest.jsonl"


@dataclass
class Tiny:
    """Paths of the tiny model and data, and the flags of a run of 12 steps in 2 epochs on them."""

    folder: Path
    model: Path
    train: Path
    validation: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def flags(self, *more: Any, name: str = "run") -> list[str]:
        fixed = f"--model {self.model} --dataset-manifest {self.train} --val-data {self.validation} --workers 0"
        length = f"--train-num-samples {48 * SEQ_LEN} --epochs 2 --global-batch-size 8 --warmup 2 --lr 1e-2"
        place = f"--logs {self.logs} --name {name} --log-every-n-steps 1 --experts 4 --moe-every 2 --seed 1"
        return [*f"{fixed} {length} {place}".split(), *map(str, more)]

    def start(self, *more: Any, name: str = "run") -> int:
        """Runs the trainer in this process; returns its exit code."""
        return main(self.flags(*more, name=name))

    def run_folder(self, name: str = "run") -> Path:
        return self.logs / name

    def records(self, name: str = "run") -> list[dict[str, Any]]:
        """What metrics.jsonl holds, in order."""
        return [json.loads(line) for line in (self.run_folder(name) / "metrics.jsonl").read_text().splitlines()]

    def losses(self, name: str = "run") -> dict[int, float]:
        """Step -> train/loss."""
        return {r["step"]: r["train/loss"] for r in self.records(name) if "train/loss" in r}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    model = folder / "tiny.json"
    model.write_text(json.dumps(MODEL))
    return Tiny(
        folder, model, write_source(folder / "train", 3, 40, seed=1), write_source(folder / "valid", 1, 20, seed=2)
    )


@pytest.fixture
def tiny(tiny_data: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The tiny data with a folder of runs, and a cache folder, of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Tiny(tmp_path, tiny_data.model, tiny_data.train, tiny_data.validation)


@pytest.fixture(scope="session")
def make_source() -> Callable[..., Path]:
    """See `write_source`."""
    return write_source
