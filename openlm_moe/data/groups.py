"""The unit of work in `prepare`: a group of input files, tokenised, packed, shuffled and written as its own shards.

Groups follow from the list of files and the seed alone. So however many tasks and workers share them, the shards are
the same, and a group that is done is known by its part file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openlm_moe.data.cache import write_atomically
from openlm_moe.data.documents import read_documents
from openlm_moe.data.order import permutation
from openlm_moe.data.packing import even_parts, pack
from openlm_moe.data.shards import write_shard
from openlm_moe.data.tokenizer import load_encoder

# Samples of this many full shards are shuffled together; up to twice as many are held in memory.
_BLOCK_SHARDS = 4


@dataclass(frozen=True)
class Recipe:
    """Everything that the content of the output depends on."""

    inputs: tuple[tuple[str, int], ...]
    tokenizer_sha256: str
    end_id: int
    seq_len: int
    shard_size: int
    seed: int
    format: str
    text_key: str
    group_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**self.__dict__, "inputs": [list(pair) for pair in self.inputs]}

    def groups(self) -> list[tuple[str, ...]]:
        """The files of each group: all files in an order fixed by the seed, cut where `group_bytes` are reached."""
        groups: list[tuple[str, ...]] = []
        files: list[str] = []
        size = 0
        for number in permutation(len(self.inputs), self.seed, 5):
            url, length = self.inputs[number]
            files.append(url)
            size += length
            if size >= self.group_bytes:
                groups.append(tuple(files))
                files, size = [], 0
        return [*groups, tuple(files)] if files else groups


def part_path(output: Path, group: int) -> Path:
    """Where the record of a finished group lies."""
    return output / ".prepare" / f"{group:05d}.json"


def read_part(output: Path, group: int) -> dict[str, Any] | None:
    """The record of `group`, if it is finished and its shards are all there in full length."""
    try:
        part = json.loads(part_path(output, group).read_text())
        whole = all((output / f"{s['shard']}.tar").stat().st_size == s["bytes"] for s in part["shards"])
    except (OSError, ValueError, KeyError):
        return None
    return part if whole else None


def write_group(
    output: Path, recipe: Recipe, group: int, files: Sequence[str], tokenizer: str, end: str | None
) -> None:
    """Makes the shards of `group` and then its part file. Overwrites what an interrupted attempt left."""
    encoder = load_encoder(tokenizer, end)
    for torn in output.glob(f".{group:05d}-*"):
        torn.unlink()
    counted = {"documents": 0, "tokens": 0}

    def documents() -> Iterator[str]:
        for url in files:
            for document in read_documents(url, recipe.format, recipe.text_key):
                counted["documents"] += 1
                yield document

    def tokens() -> Iterator[np.ndarray]:
        for array in encoder.encode(documents()):
            counted["tokens"] += len(array)
            yield array

    shards: list[dict[str, Any]] = []
    length = recipe.seq_len + 1
    for block, samples in enumerate(_blocks(pack(tokens(), length), _BLOCK_SHARDS * recipe.shard_size)):
        samples = samples[permutation(len(samples), recipe.seed, 6, group, block)]
        for part in even_parts(len(samples), recipe.shard_size):
            name = f"{group:05d}-{len(shards):05d}"
            path = output / f"{name}.tar"
            digest = write_shard(path, samples[part.start : part.stop])
            entry = {"shard": name, "num_sequences": len(part), "sha256": digest, "bytes": path.stat().st_size}
            shards.append(entry)
    record = {"group": group, **counted, "shards": shards}
    write_atomically(part_path(output, group), (json.dumps(record) + "\n").encode())


def _blocks(arrays: Iterator[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """Regroups 2-D arrays into ones of `rows` rows; the last holds what is left, from `rows` up to twice as many.

    So no small shard remains at the end of a group, unless the group as a whole is small.
    """
    held: list[np.ndarray] = []
    size = 0
    for array in arrays:
        held.append(array)
        size += len(array)
        if size >= 2 * rows:
            joined = np.concatenate(held)
            while len(joined) >= 2 * rows:
                yield joined[:rows]
                joined = joined[rows:]
            held, size = [joined], len(joined)
    if size:
        yield np.concatenate(held)
