"""The global sample order: a pure function of (seed, sources, weights), whatever the ranks, workers or batch size.

Position p of the run -> (source, index in the source's stream) by `Mixture`; index -> (pass, shard, member) by
`SourceOrder`. Both are closed forms over small cached tables, so that any position is found without walking there.
All randomness is a 64-bit hash of integers written here: it does not change with a library's version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Samples shuffled together: small data is shuffled as a whole, large data by windows of whole shards, so that only
# a window's shards need to be at hand at a time.
WINDOW = 65_536
_MIX_BLOCK = 64
_KEPT_WINDOWS = 8


def hash64(values: np.ndarray | int, *keys: int) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014) over each of `values` (integers) combined with `keys`; uint64."""
    with np.errstate(over="ignore"):
        state = np.full(np.shape(values), 0x9E3779B97F4A7C15, dtype=np.uint64)
        for key in (*keys, values):
            state = state ^ np.asarray(key).astype(np.uint64)
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def permutation(n: int, *keys: int) -> np.ndarray:
    """A permutation of range(n), int64, fixed by `keys`."""
    return np.argsort(hash64(np.arange(n), *keys), kind="stable")


def below(bounds: np.ndarray, *keys: np.ndarray | int) -> np.ndarray:
    """Integers in [0, bounds), one for each of `bounds` (> 0), fixed by the element-wise `keys`; int64."""
    state = np.zeros(np.shape(bounds), dtype=np.uint64)
    for key in keys:
        state = hash64(state ^ hash64(key))
    return (state % np.asarray(bounds).astype(np.uint64)).astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Which source each position of the run comes from.

    At every multiple of 64 positions the shares are right to within a sample a source; inside such a block the
    sources follow one another in an order shuffled by `seed`.
    """

    weights: tuple[float, ...]
    seed: int

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source numbers, indices into the sources' streams) of `positions`, all (n,) int64. A bijection.

        Each source's stream is taken in order: of two positions of one source the later has the larger index.
        """
        if len(self.weights) == 1:
            return np.zeros_like(positions), positions
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(positions // _MIX_BLOCK).tolist():
            here = positions // _MIX_BLOCK == block
            of_block, index_of_block = self._block(block)
            sources[here] = of_block[positions[here] % _MIX_BLOCK]
            indices[here] = index_of_block[positions[here] % _MIX_BLOCK]
        return sources, indices

    def taken(self, position: int) -> list[int]:
        """How many samples of each source the positions before `position` take."""
        block = position // _MIX_BLOCK
        sources, _ = self.split(np.arange(block * _MIX_BLOCK, position))
        before = self._counts(np.array([block * _MIX_BLOCK]))[:, 0]
        return (before + np.bincount(sources, minlength=len(self.weights))).tolist()

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        counts = self._counts(np.arange(block * _MIX_BLOCK, (block + 1) * _MIX_BLOCK + 1))
        sources = np.argmax(np.diff(counts), axis=0)[permutation(_MIX_BLOCK, self.seed, 1, block)]
        indices = np.empty_like(sources)
        for source in range(len(self.weights)):
            mine = np.flatnonzero(sources == source)
            indices[mine] = counts[source, 0] + np.arange(len(mine))
        return sources, indices

    def _counts(self, slots: np.ndarray) -> np.ndarray:
        """(sources, n): how many of the slots before each of `slots` belong to each source.

        Source 0 takes its share of all slots, source 1 its share of the rest, and so on; each share is rounded in
        integers, so that exactly one source advances at each slot.
        """
        rest, counts = slots, []
        remaining = sum(Fraction(weight) for weight in self.weights)
        for weight in self.weights[:-1]:
            share = (Fraction(weight) / remaining).limit_denominator(1_000_000)
            remaining -= Fraction(weight)
            taken = (2 * rest * share.numerator + share.denominator) // (2 * share.denominator)
            counts.append(taken)
            rest = rest - taken
        return np.stack([*counts, rest])


@dataclass(frozen=True)
class _Pass:
    """One pass: shards in their drawn order, `starts` their first index in it, `windows` the first shard of each."""

    shards: np.ndarray
    starts: np.ndarray
    windows: np.ndarray
    length: int


class SourceOrder:
    """In which order the samples of one source are drawn, pass after pass.

    Each pass takes every shard once in a new order (`resampled`: as many shards drawn with replacement), and shuffles
    the samples of each window of consecutive shards. `counts` must not be all zero.
    """

    def __init__(self, counts: tuple[int, ...], seed: int, source: int, resampled: bool = False) -> None:
        self.counts = np.array(counts, dtype=np.int64)
        self.filled = np.flatnonzero(self.counts)
        self.keys = (seed, 2, source)
        self.resampled = resampled
        self._passes: OrderedDict[int, _Pass] = OrderedDict()
        self._shuffles: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._resampled_ends: list[int] = []

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(pass, shard, member) of each of `indices` (n,) into the source's stream, all (n,) int64."""
        passes, within = self._pass_of(indices)
        shards, members = np.empty_like(indices), np.empty_like(indices)
        for number in np.unique(passes):
            order = self._pass(int(number))
            first = order.starts[order.windows]
            windows = np.searchsorted(first, within, side="right") - 1
            for window in np.unique(windows[passes == number]):
                here = (passes == number) & (windows == window)
                flat = first[window] + self._shuffle(int(number), int(window))[within[here] - first[window]]
                slot = np.searchsorted(order.starts, flat, side="right") - 1
                shards[here], members[here] = order.shards[slot], flat - order.starts[slot]
        return passes, shards, members

    def window(self, index: int) -> tuple[int, list[int]]:
        """(first index after the window that holds `index`, the window's shards in drawn order)."""
        passes, within = self._pass_of(np.array([index]))
        order = self._pass(int(passes[0]))
        edges = [*order.starts[order.windows].tolist(), order.length]
        window = int(np.searchsorted(edges, within[0], side="right")) - 1
        stops = [*order.windows[1:].tolist(), len(order.shards)]
        shards = order.shards[order.windows[window] : stops[window]].tolist()
        return index + edges[window + 1] - int(within[0]), shards

    def _pass_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.resampled:
            return np.divmod(indices, self.counts.sum())
        while not self._resampled_ends or self._resampled_ends[-1] <= indices.max(initial=0):
            before = self._resampled_ends[-1] if self._resampled_ends else 0
            self._resampled_ends.append(before + self._pass(len(self._resampled_ends)).length)
        ends = np.array([0, *self._resampled_ends])
        passes = np.searchsorted(ends, indices, side="right") - 1
        return passes, indices - ends[passes]

    def _pass(self, number: int) -> _Pass:
        if number not in self._passes:
            total = len(self.filled)
            if self.resampled:
                drawn = self.filled[below(np.full(total, total), np.arange(total), hash64(number, *self.keys, 3))]
            else:
                drawn = self.filled[permutation(total, *self.keys, number)]
            ends = np.cumsum(self.counts[drawn])
            starts = ends - self.counts[drawn]
            windows = np.flatnonzero(np.diff(starts // WINDOW, prepend=-1))
            self._passes[number] = _Pass(drawn, starts, windows, int(ends[-1]))
            while len(self._passes) > 2:
                self._passes.popitem(last=False)
        return self._passes[number]

    def _shuffle(self, number: int, window: int) -> np.ndarray:
        key = (number, window)
        if key not in self._shuffles:
            order = self._pass(number)
            bounds = [*order.starts[order.windows].tolist(), order.length]
            self._shuffles[key] = permutation(bounds[window + 1] - bounds[window], *self.keys, number, 4, window)
            while len(self._shuffles) > _KEPT_WINDOWS:
                self._shuffles.popitem(last=False)
        return self._shuffles[key]
