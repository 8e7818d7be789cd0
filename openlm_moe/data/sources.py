"""Opens sources: expands them, counts their samples, and finds what is wrong with them before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openlm_moe.data.manifest import Shard, Source, expand_source
from openlm_moe.data.reader import ShardReader
from openlm_moe.data.remote import file_system, is_remote, local_part
from openlm_moe.data.shards import check_whole
from openlm_moe.errors import UserError

# Local data up to this size is indexed as a whole at start, which finds every fault; of larger data only each file's
# size and end are looked at, and its index is made when the shard's turn comes.
FULL_CHECK_BYTES = 8 * 2**30
_THREADS = 16
T = TypeVar("T")
R = TypeVar("R")


def open_source(text: str, reader: ShardReader) -> Source:
    """The source that `text` means, its shards checked and counted.

    Raises `UserError` for a missing, truncated or damaged shard, a manifest that disagrees with its shards, a pipe
    that is not allowed, and a source without samples.
    """
    shards = expand_source(text)
    local = [shard for shard in shards if not is_remote(shard.url)]
    remote = [shard for shard in shards if is_remote(shard.url)]
    _in_threads(lambda shard: check_whole(local_part(shard.url)), local)
    _check_remote(remote, reader)
    if sum(os.path.getsize(local_part(shard.url)) for shard in local) <= FULL_CHECK_BYTES:
        counted = set(local)
    else:
        counted = {shard for shard in local if shard.count is None}
    counted.update(shard for shard in remote if shard.count is None)
    counts = _in_threads(lambda shard: reader.count(shard) if shard in counted else shard.count, shards)
    source = Source(text, tuple(shards), tuple(counts))
    if source.num_samples == 0:
        raise UserError(f"{text} holds no samples; prepare it again")
    return source


def _check_remote(shards: Sequence[Shard], reader: ShardReader) -> None:
    """One listing per folder where the file system can list; otherwise one look per shard."""
    folders: dict[str, list[Shard]] = {}
    for shard in shards:
        folders.setdefault(shard.url.rpartition("/")[0], []).append(shard)
    for folder, members in folders.items():
        present = None if members[0].url.startswith(("pipe:", "http")) else _listing(folder)
        if present is None:
            _in_threads(lambda shard: reader.cache.check_exists(shard.url), members)
            continue
        for shard in members:
            if shard.url.rpartition("/")[2] not in present:
                raise UserError(f"shard {shard.url} does not exist; check the path, or the manifest that names it")


def _listing(folder: str) -> set[str] | None:
    fs, path = file_system(folder)
    try:
        return {name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)}
    except Exception:  # no permission to list is common; then every shard is asked for by name
        return None


def _in_threads(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(action, items))
