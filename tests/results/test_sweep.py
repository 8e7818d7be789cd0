"""results/sweep.py: which run is next, several processes, and one whole run with its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from results import records, sweep
from results.sweep_queue import Run, as_record, finished, read_queue

SIZE = "0.1M"


@pytest.fixture
def queue(monkeypatch) -> dict:
    """One stage that tunes one arm, and one that runs it at its tuned rate with another seed."""
    small = read_queue()
    tokens = 10 * 8 * 128
    tuning = {"name": "learning rates", "size": SIZE, "tokens": tokens, "lr": "all", "seeds": [0], "arms": ["dmoe-8"]}
    small["stages"] = [tuning, {**tuning, "name": "ladder", "lr": "tuned", "seeds": [1]}]
    small["learning_rates"] = [0.01, 0.02]
    monkeypatch.setattr(sweep, "read_queue", lambda: small)
    return small


def run_of(lr: float, seed: int = 0) -> Run:
    return Run(SIZE, "dmoe-8", lr, seed, 10 * 8 * 128)


def done(path: Path, run: Run, loss: float) -> None:
    records.append(path, {**as_record(run), "valid_loss": loss})


def test_runs_come_in_order_and_none_twice(queue: dict, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    with sweep.next_run(path, tmp_path) as first:
        assert first == run_of(0.01)
        with sweep.next_run(path, tmp_path) as second:  # another process: the first is held
            assert second == run_of(0.02)
    with sweep.next_run(path, tmp_path) as again:
        assert again == run_of(0.01), "it was given up without a record"
    done(path, run_of(0.01), 3.0)
    with sweep.next_run(path, tmp_path) as after:
        assert after == run_of(0.02)
    done(path, run_of(0.02), 2.0)
    with sweep.next_run(path, tmp_path) as tuned:
        assert tuned == run_of(0.02, seed=1), "the better rate, once all are tried"
    done(path, run_of(0.02, seed=1), 2.0)
    with sweep.next_run(path, tmp_path) as nothing:
        assert nothing is None


def test_the_record_of_a_run_is_read_back_as_that_run(tmp_path: Path) -> None:
    run = Run(SIZE, "dense", 0.016, 2, 77)
    done(tmp_path / "r", run, 1.0)
    assert list(finished(records.read(tmp_path / "r"))) == [run]


@pytest.mark.slow
def test_a_run_is_trained_and_recorded(queue: dict, tmp_path: Path) -> None:
    found = sweep.train_run(run_of(0.01), queue, tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert 6 < found["valid_loss"] < found["train_loss"][0][1]  # ten steps
    assert found["train_loss"][-1][0] == 10 * 8 * 128
    assert {name.split("/")[1] for name in found["load"]} == {"layer_0", "layer_2"}
    assert found["parameters"]["active"] < found["parameters"]["total"]
    assert found["corpus"]["name"] == "embedded"
