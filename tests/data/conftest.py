"""Small sources whose every sample says where it stands: token 0 is the shard, token 1 the member."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from openlm_moe.data.manifest import write_manifest
from openlm_moe.data.shards import write_shard

Maker = Callable[..., str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "openlm-moe"


@pytest.fixture
def make_source(tmp_path: Path) -> Maker:
    """`make_source(name, counts, length=5, mark=0)` -> manifest path. Sample: [shard, member, mark, 3, 4, ...]."""

    def make(name: str, counts: Sequence[int], length: int = 5, mark: int = 2) -> str:
        folder = tmp_path / name
        entries = []
        for shard, count in enumerate(counts):
            samples = np.tile(np.arange(length), (count, 1))
            samples[:, 0], samples[:, 1], samples[:, 2] = shard, np.arange(count), mark
            write_shard(folder / f"{shard:05d}.tar", samples)
            entries.append((f"{shard:05d}", count))
        write_manifest(folder / "manifest.jsonl", entries)
        return str(folder / "manifest.jsonl")

    return make


@pytest.fixture
def raw_shard(tmp_path: Path) -> Callable[..., str]:
    """`raw_shard(members, name="raw.tar")` -> path of a tar with these (member name, bytes) in order."""
    import io
    import tarfile

    def make(members: Sequence[tuple[str, bytes]], name: str = "raw.tar") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for member, data in members:
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return str(path)

    return make


@pytest.fixture
def edit_manifest() -> Callable[[str, Callable[[list[dict]], list[dict]]], None]:
    """`edit_manifest(path, change)` rewrites a manifest with `change(list of its entries)`."""

    def edit(path: str, change: Callable[[list[dict]], list[dict]]) -> None:
        entries = [json.loads(line) for line in Path(path).read_text().splitlines()]
        Path(path).write_text("".join(json.dumps(entry) + "\n" for entry in change(entries)))

    return edit
