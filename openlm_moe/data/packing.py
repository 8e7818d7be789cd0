"""From tokenised documents to samples of seq_len + 1 tokens, and from samples to shards of even size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def pack(documents: Iterable[np.ndarray], length: int, dtype: type = np.uint32) -> Iterator[np.ndarray]:
    """Joins token arrays and cuts the stream into blocks of `length` tokens; yields arrays (n, length).

    The tokens after the last whole sample are left out (fewer than `length` of them).
    """
    held: list[np.ndarray] = []
    size = 0
    for tokens in documents:
        held.append(tokens)
        size += len(tokens)
        if size >= length * 64:
            stream = np.concatenate(held)
            whole = len(stream) // length * length
            yield stream[:whole].reshape(-1, length)
            held, size = [stream[whole:]], len(stream) - whole
    stream = np.concatenate(held) if held else np.empty(0, dtype=dtype)
    whole = len(stream) // length * length
    if whole:
        yield stream[:whole].reshape(-1, length)


def even_parts(total: int, largest: int) -> list[range]:
    """Cuts range(total) into as few parts as `largest` allows, their sizes at most one apart."""
    parts = -(-total // largest)
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
