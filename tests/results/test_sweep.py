"""results/sweep.py: which run is next, several processes, and one whole run with its record."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from openlm_moe import UserError
from results import linux_corpus, records, sweep
from results.sweep_queue import Run, as_record, finished, read_queue

SIZE = "0.1M"


@pytest.fixture
def queue(monkeypatch) -> dict:
    """One stage that tunes one arm, and one that runs it at its tuned rate with another seed."""
    small = read_queue()
    tokens = 10 * 8 * 128
    tuning = {"name": "learning rates", "size": SIZE, "tokens": tokens, "lr": "all", "seeds": [0], "arms": ["dmoe-8"]}
    small["stages"] = [tuning, {**tuning, "name": "ladder", "lr": "tuned", "seeds": [1]}]
    small["learning_rates"] = {SIZE: [0.01, 0.02]}
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
def test_records_survive_a_half_line_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r"
    records.append(path, {"a": 1})
    path.open("a").write('{"a": 2')
    records.append(path, {"a": 3})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": 2', '{"a": 3}']
    with pytest.raises(UserError, match=f"{path}, line 2 is no record"):
        records.read(path)
    path.write_text('{"a": 1}\n\n')
    with pytest.raises(UserError, match="line 2 is no record"):
        records.read(path)


@pytest.mark.parametrize(
    ("told", "recorded"), [("the loss of step 3 is not finite", True), ("the disk is full", False)]
)
def test_only_a_run_that_diverged_has_a_record_without_a_loss(queue, tmp_path, monkeypatch, told, recorded) -> None:
    def fail(argv: list[str]) -> int:
        print(told, file=sys.stderr)
        folder = tmp_path / run.name / "run"
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
        return 1

    run = Run("0.1M", "dense", 1e-2, 0, 2048)
    monkeypatch.setattr(sweep, "train", fail)
    if recorded:
        assert sweep.train_run(run, queue, tmp_path)["valid_loss"] is None
    else:
        with pytest.raises(SystemExit):
            sweep.train_run(run, queue, tmp_path)


def test_a_run_is_trained_and_recorded(queue: dict, tmp_path: Path) -> None:
    found = sweep.train_run(run_of(0.01), queue, tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert 6 < found["valid_loss"] < found["train_loss"][0][1]  # ten steps
    assert found["train_loss"][-1][0] == 10 * 8 * 128
    assert {name.split("/")[1] for name in found["load"]} == {"layer_0", "layer_2"}
    assert found["parameters"]["active"] < found["parameters"]["total"]
    assert found["corpus"]["name"] == "embedded"


@pytest.mark.slow
def test_a_run_told_to_stop_has_no_record_and_goes_on(queue: dict, tmp_path: Path) -> None:
    run = run_of(0.01)
    folder = tmp_path / run.name / "run"
    folder.mkdir(parents=True)
    (folder / "stop").touch()
    assert sweep.train_run(run, queue, tmp_path) is None
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_0000001"]
    stopped = sweep.train_run(run, queue, tmp_path)
    assert stopped is not None
    whole = sweep.train_run(run, queue, tmp_path / "whole")
    assert whole is not None
    assert stopped["valid_loss"] == pytest.approx(whole["valid_loss"], rel=1e-6)


@pytest.mark.slow
def test_an_upcycled_run_begins_where_the_dense_one_ended(queue: dict, tmp_path: Path) -> None:
    run = Run(SIZE, "upcycled-8", 0.01, 0, 10 * 8 * 128)
    dense = sweep.train_run(Run(SIZE, "dense-swiglu", 0.01, 0, run.tokens), queue, tmp_path / "dense")
    found = sweep.train_run(run, queue, tmp_path)
    first, last = found["train_loss"][0], dense["train_loss"][-1]
    assert first[0] == 8 * 128  # it counts its own tokens
    assert dense["train_loss"][0][1] > first[1]
    assert first[1] == pytest.approx(last[1], rel=0.05)
    assert found["valid_loss"] < dense["valid_loss"]
    assert found["parameters"]["total"] > dense["parameters"]["total"]


def test_the_c_sources_of_a_kernel_tree(tmp_path: Path) -> None:
    archive = tmp_path / "linux-source-6.1.tar.xz"
    texts = {"mm/slab.c": "b", "fs/ext4/inode.h": "a", "drivers/net/x.c": "no", "mm/Kconfig": "no", "mmx/y.c": "no"}
    with tarfile.open(archive, "w:xz") as tar:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"linux-source-6.1/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    assert linux_corpus._sources(archive) == [("fs/ext4/inode.h", "a"), ("mm/slab.c", "b")]


def test_without_the_corpus_advice_is_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(linux_corpus, "cache_root", lambda: tmp_path)
    with pytest.raises(SystemExit, match=r"python -m results\.linux_corpus"):
        linux_corpus.linux_corpus(128)


def test_the_time_of_a_run_is_that_of_all_its_steps() -> None:
    rows = [
        {"step": 1, "train/batch_time": 2.0},
        {"step": 4, "valid/x/loss": 1.0},
        {"step": 5, "train/batch_time": 0.5},
    ]
    assert sweep.seconds(rows) == 2.0 + 4 * 0.5
    assert sweep.seconds([]) == 0.0
