"""Training data: one order for any ranks, workers and batch sizes; exact resume; every mistake told before step one."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from openlm_moe.data import order
from openlm_moe.data.loader import TrainData, open_data
from openlm_moe.data.samples import Batch
from openlm_moe.data.shards import write_shard
from openlm_moe.errors import UserError

Maker = Callable[..., str]
Id = tuple[int, int, int]


def ids(batch: Batch) -> list[Id]:
    """(mark of the source, shard, member) of each row; see conftest."""
    return [(row[2], row[0], row[1]) for row in batch["tokens"].tolist()]


def run(
    data: TrainData, size: int, world: int = 1, start: int = 0, steps: int | None = None, workers: int = 0
) -> list[Id]:
    """The ids of all ranks in global order."""
    ranks = [
        list(data.batches(size, rank=rank, world_size=world, start_sample=start, num_batches=steps, workers=workers))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    return [sample for step in zip(*ranks, strict=True) for batch in step for sample in ids(batch)]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW", 20)


COUNTS = [13, 7, 20, 1, 30, 9]  # 80 samples in 6 uneven shards


def test_one_pass_takes_every_sample_once_with_its_tokens(make_source: Maker, small_windows: None) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4, seed=3)
    assert data.num_samples == 80
    batches = list(data.batches(8))
    found = [sample for batch in batches for sample in ids(batch)]
    assert sorted(found) == [(2, shard, member) for shard, count in enumerate(COUNTS) for member in range(count)]
    assert found != sorted(found)
    for batch in batches:
        assert batch["mask"] is None and batch["tokens"].dtype == torch.int64 and batch["tokens"].shape == (8, 5)
        assert batch["tokens"][:, 2:].tolist() == [[2, 3, 4]] * 8
        for (_, shard, member), where in zip(ids(batch), batch["provenance"], strict=True):
            assert where.endswith(f"/a/{shard:05d}.tar sample {member}")


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [8, 10])
def test_order_does_not_depend_on_ranks_or_batch_size(
    make_source: Maker, small_windows: None, world: int, size: int
) -> None:
    data = open_data(
        [make_source("a", COUNTS), make_source("b", COUNTS, mark=7)], seq_len=4, seed=3, mix_weights=[2, 1]
    )
    expected = run(data, 1, steps=80)
    assert run(data, size, world, steps=80 // size) == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_order_does_not_depend_on_workers(make_source: Maker, small_windows: None, workers: int) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4, seed=3)
    assert run(data, 8, workers=workers) == run(data, 8)


def test_more_workers_and_ranks_than_shards_lose_nothing(make_source: Maker) -> None:
    data = open_data([make_source("a", [8])], seq_len=4)
    assert sorted(run(data, 4, world=4, workers=2)) == [(2, 0, member) for member in range(8)]


def test_seed_gives_the_order(make_source: Maker) -> None:
    source = make_source("a", COUNTS)
    runs = [run(open_data([source], seq_len=4, seed=seed), 8) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("consumed", [0, 8, 24, 72, 80, 88, 160, 168])
def test_resume_on_other_ranks_workers_and_batch_sizes(make_source: Maker, small_windows: None, consumed: int) -> None:
    sources = [make_source("a", COUNTS), make_source("b", [40], mark=7)]
    options = dict(seq_len=4, seed=3, mix_weights=[0.7, 0.3], multiple_data_passes=True)
    unbroken = run(open_data(sources, **options), 8, steps=30)
    data = open_data(sources, **options)
    start = data.resume(json.loads(json.dumps(data.state(consumed))))
    assert start == consumed
    for size, world in [(8, 1), (4, 2), (12, 4)]:
        steps = (240 - consumed) // size
        workers = 1 if (size, consumed) == (12, 24) else 0
        assert run(data, size, world, start, steps, workers) == unbroken[consumed : consumed + steps * size]


def test_passes_are_whole_and_each_shuffled_anew(make_source: Maker, small_windows: None) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4, multiple_data_passes=True)
    assert data.num_samples is None
    found = run(data, 10, steps=24)
    passes = [found[start : start + 80] for start in (0, 80, 160)]
    assert all(len(set(samples)) == 80 for samples in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_resampling_repeats_and_never_ends(make_source: Maker) -> None:
    data = open_data([make_source("a", [10] * 8)], seq_len=4, resampled=True)
    found = run(data, 10, steps=40)
    assert len(set(found[:80])) < 80
    assert data.num_samples is None
    assert run(data, 10, start=100, steps=30) == found[100:]


def test_mix_weights_are_the_shares(make_source: Maker) -> None:
    sources = [make_source(name, [400], mark=mark) for name, mark in [("a", 5), ("b", 6), ("c", 7)]]
    drawn = Counter(mark for mark, _, _ in run(open_data(sources, seq_len=4, mix_weights=[6, 3, 1]), 8, steps=32))
    assert all(abs(drawn[mark] - share * 256) < 25 for mark, share in [(5, 0.6), (6, 0.3), (7, 0.1)])
    even = Counter(mark for mark, _, _ in run(open_data(sources, seq_len=4), 1024, steps=1))
    assert sorted(even.values()) == [341, 341, 342]


def test_a_run_that_needs_more_is_refused_with_numbers(make_source: Maker) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4)
    data.require(80)
    with pytest.raises(
        UserError, match=r"needs 81 samples, 81 of them from .*a/manifest.jsonl, which has 80; .*at most 80"
    ):
        data.require(81)
    with pytest.raises(UserError, match="needs 88 samples"):
        next(data.batches(8, rank=1, world_size=2, start_sample=40, num_batches=6))
    assert len(list(data.batches(32))) == 2  # what no whole batch remains for is left
    assert len(list(data.batches(32, start_sample=64))) == 0


def test_the_smaller_source_of_a_mix_is_the_limit(make_source: Maker) -> None:
    data = open_data([make_source("a", [3000]), make_source("b", [100], mark=7)], seq_len=4, mix_weights=[0.9, 0.1])
    limit = data.num_samples
    assert limit is not None and 900 < limit < 1024
    taken = run(data, 1, steps=limit)
    assert len(set(taken)) == limit and max(member for mark, _, member in taken if mark == 7) <= 99
    with pytest.raises(UserError, match=r"101 of them from .*b/manifest.jsonl, which has 100"):
        data.require(limit + 1)


def test_samples_too_short_are_refused_or_padded(make_source: Maker) -> None:
    source = make_source("a", [6], length=5)
    with pytest.raises(UserError, match=r"has 5 tokens, but seq_len 7 needs 8; use a sequence length of at most 4"):
        open_data([source], seq_len=7)
    batch = next(open_data([source], seq_len=7, pad_short=True).batches(2))
    assert batch["mask"] is not None
    assert batch["mask"].tolist() == [[True] * 5 + [False] * 3] * 2
    assert batch["tokens"][:, 2:].tolist() == [[2, 3, 4, 0, 0, 0]] * 2


def test_longer_samples_are_cropped_at_a_place_of_their_own(make_source: Maker) -> None:
    source = make_source("a", [300], length=12)
    data = open_data([source], seq_len=4, multiple_data_passes=True)
    first, again = (np.concatenate([b["tokens"] for b in data.batches(25, num_batches=24)]) for _ in range(2))
    assert (first == again).all()
    assert (np.diff(first[:, 2:], axis=1) == 1).all()
    # 8 places, the last token included; the last two columns tell the place also where shard and member are in view.
    places = Counter((first[:, 4] - 4).tolist())
    assert set(places) == set(range(8)) and all(abs(count - 75) < 40 for count in places.values())
    for places in (
        {open_data([source], seq_len=4, seed=seed).taker.take(0, 0, 5, turn=0)[4] for seed in range(8)},
        {data.taker.take(0, 0, 5, turn)[4] for turn in range(8)},
        {data.taker.take(0, 0, member, turn=0)[4] for member in range(8)},
    ):
        assert len(places) > 2


def test_token_ids_follow_the_vocabulary(make_source: Maker, tmp_path: Path) -> None:
    source = make_source("a", [4], length=5)
    open_data([source], seq_len=4, vocab_size=5)
    with pytest.raises(UserError, match=r"00000\.tar has token id 4, but the vocabulary has 4 entries"):
        open_data([source], seq_len=4, vocab_size=4)
    write_shard(tmp_path / "n.tar", [np.array([1, -1, -101])])
    with pytest.raises(UserError, match=r"n\.tar has token id -101, but the vocabulary has 100 entries"):
        open_data([str(tmp_path / "n.tar")], seq_len=2, vocab_size=100)
    write_shard(tmp_path / "n.tar", [np.array([1, -1, -2])])
    batch = next(open_data([str(tmp_path / "n.tar")], seq_len=2, vocab_size=100).batches(1))
    assert batch["tokens"].tolist() == [[1, 99, 98]]


def test_what_is_wrong_is_found_at_start(make_source: Maker, tmp_path: Path, edit_manifest: Callable) -> None:
    def opened(change: Callable[[Path], None]) -> str:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        manifest = make_source("a", [4, 4, 4])
        change(Path(manifest).parent)
        with pytest.raises(UserError) as caught:
            open_data([manifest], seq_len=4)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def damage(folder: Path) -> None:
        data = bytearray((folder / "00001.tar").read_bytes())
        data[1024 + 150] ^= 1
        (folder / "00001.tar").write_bytes(data)

    def add_shard(folder: Path) -> None:
        edit_manifest(folder / "manifest.jsonl", lambda e: [*e, {"shard": "00007", "num_sequences": 4}])

    def count_wrong(folder: Path) -> None:
        edit_manifest(folder / "manifest.jsonl", lambda e: [e[0], e[1], {**e[2], "num_sequences": 5}])

    def count_nothing(folder: Path) -> None:
        edit_manifest(folder / "manifest.jsonl", lambda e: [{**entry, "num_sequences": 0} for entry in e])

    assert "00002.tar does not exist" in opened(lambda folder: (folder / "00002.tar").unlink())
    assert "00001.tar is truncated" in opened(lambda folder: os.truncate(folder / "00001.tar", 3000))
    assert "00001.tar is cut off or damaged after sample 1" in opened(damage)
    assert "00007.tar does not exist; check the path, or the manifest that names it" in opened(add_shard)
    assert "00002.tar holds 4 samples but its manifest says 5" in opened(count_wrong)
    assert "holds 4 samples but its manifest says 0" in opened(count_nothing)
    assert "manifest.jsonl line 1 is not" in opened(lambda folder: (folder / "manifest.jsonl").write_text("x"))


def test_large_data_is_looked_at_but_not_scanned(make_source: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_source("a", [4, 4, 4])
    monkeypatch.setattr("openlm_moe.data.sources.FULL_CHECK_BYTES", 0)
    monkeypatch.setattr("openlm_moe.data.reader._save_index", lambda path, index: scanned.append(path))
    scanned: list[Path] = []
    data = open_data([manifest], seq_len=4)
    assert len(scanned) == 1  # the shard of the first sample
    os.truncate(Path(manifest).parent / "00001.tar", 3000)
    with pytest.raises(UserError, match=r"00001\.tar is truncated"):
        open_data([manifest], seq_len=4)
    with pytest.raises(UserError, match=r"00001\.tar is truncated"):
        list(data.batches(4))


def test_bad_arguments_are_refused(make_source: Maker) -> None:
    source = make_source("a", [4])
    with pytest.raises(UserError, match="2 mix weights for 1 data sources"):
        open_data([source], seq_len=4, mix_weights=[1, 2])
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="must all be positive"):
            open_data([source, source], seq_len=4, mix_weights=[1, weight])
    with pytest.raises(UserError, match="no training data"):
        open_data([], seq_len=4)
    with pytest.raises(UserError, match="batch of 2 samples is smaller than the 4 ranks"):
        next(open_data([source], seq_len=4).batches(2, world_size=4))


def test_changed_data_are_reported_at_resume(
    make_source: Maker, tmp_path: Path, edit_manifest: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [make_source("a", COUNTS), make_source("b", COUNTS, mark=7)]
    options = dict(seq_len=4, seed=3, mix_weights=[0.75, 0.25])
    state = json.loads(json.dumps(open_data(sources, **options).state(16)))
    assert state["samples"] == 16

    def refused(sources: list[str], **changed: object) -> str:
        with pytest.raises(UserError) as caught:
            open_data(sources, **{**options, **changed}).resume(state)
        return str(caught.value)

    same = open_data(sources, **{**options, "mix_weights": [3, 1], "multiple_data_passes": True})
    assert same.resume(state) == 16
    shutil.copytree(tmp_path / "b", tmp_path / "moved")
    assert open_data([sources[0], str(tmp_path / "moved" / "manifest.jsonl")], **options).resume(state) == 16

    assert "seed was 3 and is now 4" in refused(sources, seed=4)
    assert "seq_len was 4 and is now 3" in refused(sources, seq_len=3)
    assert "weights[0] was 0.75 and is now 0.5" in refused(sources, mix_weights=[1, 1])
    assert "resampled was False and is now True" in refused(sources, resampled=True)
    assert "sources had 2 entries and now has 1" in refused(sources[:1], mix_weights=[1])
    edit_manifest(sources[1], lambda entries: entries[::-1])
    assert "sources[1].sha256 was" in refused(sources)
    edit_manifest(sources[1], lambda entries: entries[:-1])
    assert "sources[1].samples was 80 and is now" in refused(sources)

    with caplog.at_level(logging.WARNING):
        assert open_data(sources, **options).resume(state, allow_change=True) == 16
    assert "sources[1]" in caplog.text and "from sample 16" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_malformed_sample_stops_the_run_in_one_line(raw_shard: Callable[..., str], workers: int) -> None:
    path = raw_shard([(f"{number}.json", b"[1, 2, 3]" if number else b"[1, 2") for number in range(8)])
    data = open_data([path], seq_len=2, seed=4)
    with pytest.raises(UserError) as caught:
        list(data.batches(2, workers=workers))
    assert str(caught.value).startswith(f"sample 0 of shard {path} cannot be decoded as json")
    assert "\n" not in str(caught.value)


def test_malformed_sample_can_be_left_out(raw_shard: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    path = raw_shard([(f"{number}.json", b"[1, 2, 3]" if number else b"[1, 2") for number in range(8)])
    (batch,) = open_data([path], seq_len=2, ignore_parse_errors=True, pad_short=True).batches(8)
    assert batch["mask"] is not None
    assert sorted(batch["mask"].sum(1).tolist()) == [0, 3, 3, 3, 3, 3, 3, 3]
    assert "left out: sample 0 of shard" in caplog.text


def test_reading_takes_nothing_from_the_runs_generator(make_source: Maker) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4)
    before = torch.get_rng_state()
    list(data.batches(8, workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_can_be_spawned(make_source: Maker, small_windows: None) -> None:
    data = open_data([make_source("a", COUNTS)], seq_len=4, seed=3)
    expected = run(data, 8)
    assert run(pickle.loads(pickle.dumps(data)), 8) == expected


def test_closing_early_ends_the_workers(make_source: Maker) -> None:
    import multiprocessing

    batches = open_data([make_source("a", COUNTS)], seq_len=4).batches(8, workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []
