"""Manifests and sources: from what stands on the command line to the list of shards it means.

A manifest is open_lm's manifest.jsonl: one line a shard, {"shard": name without .tar, "num_sequences": n}, beside
the shards (older ones say num_chunks). A source is a manifest, or tar paths with braces, several joined by `::`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openlm_moe.data.cache import write_atomically
from openlm_moe.data.remote import PIPE, is_remote, read_bytes
from openlm_moe.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One tar: where it is, what it is called, how many samples it is said to hold (None: nobody said)."""

    url: str
    name: str
    count: int | None = None


@dataclass(frozen=True)
class Source:
    """One data source: its text on the command line and its shards, in the order they are named."""

    text: str
    shards: tuple[Shard, ...]
    counts: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        return sum(self.counts)

    def digest(self) -> str:
        """SHA-256 of the shard names and counts, without their folder: moved data is the same data."""
        listing = [[shard.name, count] for shard, count in zip(self.shards, self.counts, strict=True)]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def read_manifest(url: str) -> list[Shard]:
    """The shards that the manifest at `url` names. Raises `UserError` naming file and line where it is malformed."""
    folder = url.rpartition("/")[0]
    shards: list[Shard] = []
    for number, line in enumerate(read_bytes(url, "manifest").decode(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name = entry["shard"]
            count = entry["num_sequences"] if "num_sequences" in entry else entry["num_chunks"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'manifest {url} line {number} is not {{"shard": ..., "num_sequences": ...}}; make the manifest again'
            ) from error
        if type(count) is not int or count < 0 or not isinstance(name, str) or not name:
            raise UserError(f"manifest {url} line {number} has shard {name!r} with {count!r} samples; make it again")
        name = name.removesuffix(".tar")
        shards.append(Shard(f"{folder}/{name}.tar" if folder else f"{name}.tar", name, count))
    if not shards:
        raise UserError(f"manifest {url} names no shard; make it again")
    repeated = len(shards) - len({shard.name for shard in shards})
    if repeated:
        raise UserError(f"manifest {url} names {repeated} shards more than once; make it again")
    return shards


def write_manifest(path: Path, shards: Iterable[tuple[str, int]]) -> None:
    """Writes (name without .tar, number of samples) pairs as a manifest, atomically."""
    lines = [json.dumps({"shard": name, "num_sequences": count}) + "\n" for name, count in shards]
    write_atomically(path, "".join(lines).encode())


def expand_source(text: str) -> list[Shard]:
    """The shards that one source means; counts stay None where no manifest stands beside them.

    `text` ending in .jsonl is a manifest; anything else is tar paths with braces, joined by `::`.
    """
    if text.endswith(".jsonl"):
        return read_manifest(text)
    urls: list[str] = []
    for part in text.split("::"):
        urls.extend(_expand_braces(part) if "{" in part else [part])
    named = [Shard(url, url.rpartition("/")[2].removesuffix(".tar")) for url in urls]
    return _with_counts_from_manifest(named)


def _expand_braces(pattern: str) -> list[str]:
    try:
        import braceexpand
    except ImportError as error:
        raise UserError(f'{pattern} has braces, which need braceexpand: pip install "openlm-moe[data]"') from error
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"cannot expand the braces in {pattern}: {error}") from error


def _with_counts_from_manifest(shards: list[Shard]) -> list[Shard]:
    folders = {shard.url.rpartition("/")[0] for shard in shards}
    if len(folders) != 1 or any(shard.url.startswith(PIPE) for shard in shards):
        return shards
    folder = folders.pop()
    beside = f"{folder}/manifest.jsonl" if folder else "manifest.jsonl"
    if not is_remote(beside) and not Path(beside).is_file():
        return shards
    try:
        counts = {shard.name: shard.count for shard in read_manifest(beside)}
    except UserError:
        return shards  # a manifest that nobody named is a help, not a condition
    if not all(shard.name in counts for shard in shards):
        return shards
    return [Shard(shard.url, shard.name, counts[shard.name]) for shard in shards]
