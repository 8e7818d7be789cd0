"""Validation sets: every sample once, the same shapes and number of batches on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openlm_moe.data.evaluation import open_evaluation, set_names
from openlm_moe.errors import UserError

Maker = Callable[..., str]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [[1], [3, 4], [8], [5, 0, 6], [9, 9, 7]])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_sample_once_and_equal_shapes(make_source: Maker, world: int, count: list[int], size: int) -> None:
    filled = [number for number in count if number]
    (data,) = open_evaluation([make_source("v", filled)], seq_len=4)
    ranks = [list(data.batches(size, rank=rank, world_size=world)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {data.num_batches(size, world)}
    found, rows = [], 0
    for step in zip(*ranks, strict=True):
        assert len({batch["tokens"].shape for batch in step}) == 1
        assert 1 <= step[0]["tokens"].shape[0] <= size
        for batch in step:
            rows += batch["tokens"].shape[0]
            real = [True] * len(batch["tokens"]) if batch["mask"] is None else batch["mask"].all(1).tolist()
            assert batch["mask"] is None or (batch["mask"].any(1) == batch["mask"].all(1)).all()
            found += [tuple(row[:2]) for row, good in zip(batch["tokens"].tolist(), real, strict=True) if good]
            assert len(batch["provenance"]) == sum(real)
    assert sorted(found) == [(shard, member) for shard, number in enumerate(filled) for member in range(number)]
    assert rows - len(found) < world


def test_one_rank_needs_no_padding(make_source: Maker) -> None:
    (data,) = open_evaluation([make_source("v", [7])], seq_len=4)
    batches = list(data.batches(3, workers=1))
    assert [len(batch["tokens"]) for batch in batches] == [3, 3, 1]
    assert all(batch["mask"] is None for batch in batches)


def test_samples_can_be_limited(make_source: Maker) -> None:
    (data,) = open_evaluation([make_source("v", [3, 4])], seq_len=4, max_samples=4)
    tokens = [row[:2] for batch in data.batches(8) for row in batch["tokens"].tolist()]
    assert tokens == [[0, 0], [0, 1], [0, 2], [1, 0]]


def test_sets_are_opened_and_checked_one_by_one(make_source: Maker, raw_shard: Callable[..., str]) -> None:
    good, bad = make_source("v", [3]), raw_shard([("a.txt", b"[1, 2]")])
    sets = open_evaluation([good, good], seq_len=4, data_key=["json.gz", "auto"])
    assert [(data.name, data.num_samples) for data in sets] == [("v", 3), ("v_2", 3)]
    with pytest.raises(UserError, match="has 2 tokens, but seq_len 4"):
        open_evaluation([good, bad], seq_len=4)
    with pytest.raises(UserError, match="1 validation data keys for 2"):
        open_evaluation([good, bad], seq_len=4, data_key=["auto"])


def test_names_come_from_the_paths() -> None:
    assert set_names(
        [
            "data/c4/manifest.jsonl",
            "data/paloma/shard_{000..010}.tar",
            "data/val.tar",
            "s3://bucket/wiki/manifest.jsonl",
            "other/val.tar",
            "pipe:aws s3 cp s3://b/x/shard 0.tar -",
            "manifest.jsonl",
            "third/val.tar",
        ]
    ) == ["c4", "paloma", "val", "wiki", "val_2", "shard_0", "data", "val_3"]
