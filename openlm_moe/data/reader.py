"""Reads single samples of shards by number: open files and indices are kept, indices also on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

from openlm_moe.data.cache import cache_root, write_atomically
from openlm_moe.data.manifest import Shard
from openlm_moe.data.remote import ShardCache
from openlm_moe.data.shards import ShardIndex, decode_sample, index_shard
from openlm_moe.errors import UserError

DEFAULT_CACHE_BYTES = 64 * 2**30
_OPEN_SHARDS = 64


class ShardReader:
    """Access to any sample of any shard. Picklable; every process that uses it opens its own files."""

    def __init__(
        self,
        data_key: str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        allow_pipe: bool = False,
    ) -> None:
        root = cache_root(cache_dir)
        self.data_key = data_key
        self.cache = ShardCache(root / "shards", cache_bytes, allow_pipe)
        self._index_folder = root / "indices"
        self._open: OrderedDict[str, tuple[int, ShardIndex]] = OrderedDict()
        self._owner = os.getpid()

    def count(self, shard: Shard) -> int:
        """How many samples `shard` really holds; keeps nothing open and may run in threads.

        Raises `UserError` for a missing or damaged shard, and where its manifest says another number.
        """
        descriptor, identity = self.cache.open(shard.url)
        try:
            return len(self._index(shard, descriptor, identity))
        finally:
            os.close(descriptor)

    def read(self, shard: Shard, member: int) -> np.ndarray:
        """Token ids (1-D int64) of sample `member` of `shard`. Raises `UserError` naming both if it is malformed."""
        descriptor, index = self._shard(shard)
        offset, size = index.extents[member].tolist()
        data = os.pread(descriptor, size, offset)
        if len(data) < size:
            raise UserError(f"shard {shard.url} is truncated at sample {member}; write or download it again")
        return decode_sample(data, index.suffix, f"sample {member} of shard {shard.url}")

    def fetch(self, shard: Shard) -> None:
        """Makes sure that a remote `shard` has a local copy."""
        os.close(self.cache.open(shard.url)[0])

    def close(self) -> None:
        """Closes every file that is open in this process."""
        if self._owner == os.getpid():
            for descriptor, _ in self._open.values():
                os.close(descriptor)
        self._open.clear()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict(), "_owner": -1}

    def _shard(self, shard: Shard) -> tuple[int, ShardIndex]:
        if self._owner != os.getpid():  # forked: the parent's descriptors share their state with it, leave them
            self._open, self._owner = OrderedDict(), os.getpid()
        if shard.url not in self._open:
            descriptor, identity = self.cache.open(shard.url)
            try:
                index = self._index(shard, descriptor, identity)
            except BaseException:
                os.close(descriptor)
                raise
            self._open[shard.url] = (descriptor, index)
            while len(self._open) > _OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1][0])
        self._open.move_to_end(shard.url)
        return self._open[shard.url]

    def _index(self, shard: Shard, descriptor: int, identity: str) -> ShardIndex:
        name = hashlib.sha256(f"{self.data_key} {identity}".encode()).hexdigest()[:32]
        saved = self._index_folder / f"{name}.npz"
        index = _load_index(saved)
        if index is None:
            with open(os.dup(descriptor), "rb") as file:
                index = index_shard(file, self.data_key, shard.url)
            _save_index(saved, index)
        if shard.count is not None and shard.count != len(index):
            raise UserError(
                f"shard {shard.url} holds {len(index)} samples but its manifest says {shard.count}; "
                "make the manifest again, or write the shard again"
            )
        return index


def _load_index(path: Path) -> ShardIndex | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return ShardIndex(arrays["extents"], str(arrays["suffix"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save_index(path: Path, index: ShardIndex) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, extents=index.extents, suffix=np.array(index.suffix))
    with contextlib.suppress(OSError):  # a full disk costs the next run a scan, no more
        write_atomically(path, buffer.getvalue())
