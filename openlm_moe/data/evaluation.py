"""Validation sets: every sample once, split over the ranks so that all of them have the same number of batches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

from openlm_moe.data.batches import run_batches
from openlm_moe.data.reader import DEFAULT_CACHE_BYTES, ShardReader
from openlm_moe.data.samples import Batch, SampleTaker
from openlm_moe.data.sources import open_source
from openlm_moe.errors import UserError


class EvaluationSet:
    """One opened validation set, called `name` in metrics; make it with `open_evaluation`."""

    def __init__(self, name: str, taker: SampleTaker, num_samples: int) -> None:
        self.name = name
        self.taker = taker
        self.num_samples = num_samples
        self._ends = np.cumsum(taker.sources[0].counts)

    def num_batches(self, batch_size: int, world_size: int = 1) -> int:
        """How many batches each rank gets at `batch_size` samples a rank."""
        return -(-self.num_samples // (batch_size * world_size))

    def batches(
        self, batch_size: int, *, rank: int = 0, world_size: int = 1, workers: int = 0, pin_memory: bool = False
    ) -> Iterator[Batch]:
        """This rank's batches, in the set's order. Batch n has the same shape on every rank.

        The samples that are left for the last batch are spread over the ranks; a rank that gets fewer than another
        has rows that are all padding (`mask` False), so that no rank runs out of batches before the others.
        """
        job = _RankBatches(self, batch_size, rank, world_size)
        return run_batches(job, range(self.num_batches(batch_size, world_size)), workers, pin_memory)

    def rows(self, number: int, batch_size: int, rank: int, world_size: int) -> tuple[range, int]:
        """(samples of this rank in batch `number`, rows of that batch on every rank)."""
        first = number * batch_size * world_size
        left = min(batch_size * world_size, self.num_samples - first)
        rows = -(-left // world_size)
        return range(first + min(rank * rows, left), first + min((rank + 1) * rows, left)), rows

    def places(self, samples: range) -> list[tuple[int, int, int, int]]:
        """(source, shard, member, turn) of the samples with these numbers."""
        shards = np.searchsorted(self._ends, np.arange(samples.start, samples.stop), side="right").tolist()
        starts = (self._ends - np.array(self.taker.sources[0].counts)).tolist()
        return [(0, shard, number - starts[shard], 0) for shard, number in zip(shards, samples, strict=True)]


def open_evaluation(
    sources: Sequence[str],
    *,
    seq_len: int,
    vocab_size: int | None = None,
    max_samples: int | None = None,
    data_key: str | Sequence[str] = "auto",
    pad_short: bool = False,
    ignore_parse_errors: bool = False,
    allow_pipe: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> list[EvaluationSet]:
    """Opens each of `sources` as a validation set of its own; `max_samples` cuts each short.

    `data_key` is one for all or one for each. Raises `UserError` as `open_data` does.
    """
    keys = [data_key] * len(sources) if isinstance(data_key, str) else list(data_key)
    if len(keys) != len(sources):
        raise UserError(f"{len(keys)} validation data keys for {len(sources)} validation sets; give one, or one each")
    opened = []
    for text, key, name in zip(sources, keys, set_names(sources), strict=True):
        reader = ShardReader(key, cache_dir, cache_bytes, allow_pipe)
        source = open_source(text, reader)
        taker = SampleTaker([source], reader, seq_len, vocab_size, 0, pad_short, ignore_parse_errors)
        number = source.num_samples if max_samples is None else min(max_samples, source.num_samples)
        data = EvaluationSet(name, taker, number)
        taker.take(*data.places(range(1))[0])
        reader.close()
        opened.append(data)
    return opened


def set_names(sources: Sequence[str]) -> list[str]:
    """Short, distinct names for validation sets: the manifest's folder, the tar's name, or the tars' folder."""
    names: list[str] = []
    for text in sources:
        folder, _, last = text.split("::")[0].split(" -")[0].rpartition("/")
        stem = last.removesuffix(".tar").removesuffix(".jsonl")
        name = folder.rpartition("/")[2] if stem == "manifest" or "{" in stem else stem
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_") or "data"
        taken = sum(other == name or other.startswith(f"{name}_") for other in names)
        names.append(f"{name}_{taken + 1}" if name in names else name)
    return names


class _RankBatches:
    def __init__(self, data: EvaluationSet, batch_size: int, rank: int, world_size: int) -> None:
        self.data, self.batch_size, self.rank, self.world_size = data, batch_size, rank, world_size

    def __getitem__(self, number: int) -> Batch:
        samples, rows = self.data.rows(number, self.batch_size, self.rank, self.world_size)
        return self.data.taker.batch(self.data.places(samples), rows)
