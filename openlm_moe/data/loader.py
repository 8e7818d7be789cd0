"""Training data: which samples a run sees, in which order, and each rank's part of every global batch.

Everything follows from a sample's global position: the order is a function of (seed, sources, weights), a rank takes
its slice of each global batch, a worker computes whole batches. So ranks, workers and batch size change nothing in
the order, every rank has the same number of batches, and the number of samples consumed is all there is to resume.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from openlm_moe.data.batches import run_batches
from openlm_moe.data.fetch import FetchAhead
from openlm_moe.data.manifest import Source
from openlm_moe.data.order import Mixture, SourceOrder
from openlm_moe.data.reader import DEFAULT_CACHE_BYTES, ShardReader
from openlm_moe.data.samples import Batch, SampleTaker
from openlm_moe.data.sources import open_source
from openlm_moe.errors import UserError

log = logging.getLogger(__name__)


class TrainData:
    """An opened training set; make it with `open_data`."""

    def __init__(
        self, taker: SampleTaker, mixture: Mixture, orders: Sequence[SourceOrder], seed: int, unlimited: bool
    ) -> None:
        self.taker = taker
        self.mixture = mixture
        self.orders = tuple(orders)
        self.seed = seed
        self.unlimited = unlimited

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.taker.sources

    @property
    def seq_len(self) -> int:
        return self.taker.seq_len

    @property
    def num_samples(self) -> int | None:
        """How many samples a run can take from one pass at these weights; None where passes may repeat."""
        if self.unlimited:
            return None
        low, high = 0, sum(source.num_samples for source in self.sources) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._lacking(middle) is None else (low, middle)
        return low

    def require(self, samples: int) -> None:
        """Raises `UserError` with needed and available numbers where a run of `samples` samples cannot be served.

        The count is over all ranks, workers and epochs.
        """
        lacking = None if self.unlimited else self._lacking(samples)
        if lacking is not None:
            source, needed = lacking
            raise UserError(
                f"the run needs {samples} samples, {needed} of them from {source.text}, which has "
                f"{source.num_samples}; lower --train-num-samples (tokens per epoch) or --epochs to at most "
                f"{self.num_samples} samples in all, change the mix weights, or allow --multiple-data-passes"
            )

    def _lacking(self, samples: int) -> tuple[Source, int] | None:
        for source, needed in zip(self.sources, self.mixture.taken(samples), strict=True):
            if needed > source.num_samples:
                return source, needed
        return None

    def samples(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """(source, shard, member, pass) of the global positions start..stop-1."""
        sources, indices = self.mixture.split(np.arange(start, stop))
        found = np.empty((stop - start, 4), dtype=np.int64)
        for number, order in enumerate(self.orders):
            here = sources == number
            turns, shards, members = order.locate(indices[here])
            found[here] = np.stack([np.full_like(shards, number), shards, members, turns], axis=1)
        return [tuple(row) for row in found.tolist()]

    def batches(
        self,
        global_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        start_sample: int = 0,
        num_batches: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch, from sample `start_sample` on: the same number on every rank.

        `num_batches` defaults to as many whole batches as there are (endless where passes may repeat). Raises
        `UserError` before the first batch where the data do not suffice.
        """
        if global_batch_size < world_size:
            raise UserError(f"the global batch of {global_batch_size} samples is smaller than the {world_size} ranks")
        if num_batches is None and self.num_samples is not None:
            num_batches = max(0, self.num_samples - start_sample) // global_batch_size
        if num_batches is not None:
            self.require(start_sample + num_batches * global_batch_size)
        job = _RankBatches(self, global_batch_size, rank, world_size, start_sample)
        numbers = itertools.count() if num_batches is None else range(num_batches)
        return run_batches(job, numbers, workers, pin_memory)

    def order_record(self) -> dict[str, Any]:
        """What fixes the order, as JSON."""
        total = math.fsum(self.mixture.weights)
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "resampled": self.orders[0].resampled,
            "weights": [weight / total for weight in self.mixture.weights],
            "sources": [
                {"shards": len(source.shards), "samples": source.num_samples, "sha256": source.digest()}
                for source in self.sources
            ],
        }

    def state(self, samples: int) -> dict[str, Any]:
        """What a checkpoint keeps (JSON) after `samples` samples over all ranks."""
        return {"samples": samples, "order": self.order_record()}

    def resume(self, state: dict[str, Any], allow_change: bool = False) -> int:
        """The `start_sample` to continue from. Raises `UserError` where the data are not those of `state`.

        With `allow_change` the difference is a warning and the count goes on in the new order.
        """
        difference = _difference(state["order"], self.order_record())
        if difference is not None:
            message = f"the data differ from those of the checkpoint: {difference}"
            if not allow_change:
                raise UserError(f"{message}; give the same data, or pass --allow-data-change")
            log.warning("%s; going on with the new data from sample %d", message, state["samples"])
        return int(state["samples"])


def open_data(
    sources: Sequence[str],
    *,
    seq_len: int,
    seed: int = 0,
    mix_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    multiple_data_passes: bool = False,
    resampled: bool = False,
    data_key: str = "auto",
    pad_short: bool = False,
    ignore_parse_errors: bool = False,
    allow_pipe: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> TrainData:
    """Opens training data: each of `sources` is a manifest.jsonl or tar paths with braces (joined by `::`).

    `mix_weights` (default: equal) say which share of the samples comes from each source. One pass over the data is
    all there is unless `multiple_data_passes`; `resampled` draws shards with replacement, without end.
    Raises `UserError` for whatever can be found wrong before the first step.
    """
    if not sources:
        raise UserError("no training data given")
    weights = tuple(float(weight) for weight in (mix_weights or [1.0] * len(sources)))
    if len(weights) != len(sources):
        raise UserError(f"{len(weights)} mix weights for {len(sources)} data sources; give one weight each")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"mix weights {' '.join(map(str, weights))} must all be positive numbers")
    reader = ShardReader(data_key, cache_dir, cache_bytes, allow_pipe)
    opened = [open_source(text, reader) for text in sources]
    orders = [SourceOrder(source.counts, seed, number, resampled) for number, source in enumerate(opened)]
    taker = SampleTaker(opened, reader, seq_len, vocab_size, seed, pad_short, ignore_parse_errors)
    for number, order in enumerate(orders):
        turn, shard, member = (int(part[0]) for part in order.locate(np.array([0])))
        taker.take(number, shard, member, turn)
    reader.close()
    return TrainData(taker, Mixture(weights, seed), orders, seed, multiple_data_passes or resampled)


class _RankBatches:
    """Item n is this rank's part of the n-th global batch."""

    def __init__(self, data: TrainData, size: int, rank: int, world_size: int, start_sample: int) -> None:
        self.data = data
        self.size = size
        self.first = start_sample + rank * size // world_size
        self.last = start_sample + (rank + 1) * size // world_size
        self.ahead = FetchAhead(data.sources, data.orders, data.taker.reader)

    def __getitem__(self, number: int) -> Batch:
        start, stop = self.first + number * self.size, self.last + number * self.size
        self.ahead.note(self.data.mixture.taken(start))
        return self.data.taker.batch(self.data.samples(start, stop))


def _difference(saved: Any, current: Any, path: str = "") -> str | None:
    """The first place where two JSON values differ, in words; None where they are equal."""
    if isinstance(saved, dict) and isinstance(current, dict):
        keys: Sequence[Any] = sorted(saved.keys() | current.keys())
        pairs = [(f"{path}.{key}" if path else str(key), saved.get(key), current.get(key)) for key in keys]
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        pairs = [(f"{path}[{n}]", left, right) for n, (left, right) in enumerate(zip(saved, current, strict=True))]
    elif isinstance(saved, list) and isinstance(current, list):
        return f"{path} had {len(saved)} entries and now has {len(current)}"
    else:
        return None if saved == current else f"{path} was {saved} and is now {current}"
    return next((found for name, left, right in pairs if (found := _difference(left, right, name))), None)
