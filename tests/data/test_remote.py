"""Data elsewhere: through fsspec into a bounded cache, each shard once; no shell unless allowed."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import fsspec
import numpy as np
import pytest

from openlm_moe.data import order, remote
from openlm_moe.data.fetch import FetchAhead
from openlm_moe.data.loader import open_data
from openlm_moe.data.manifest import Shard, Source
from openlm_moe.data.order import SourceOrder
from openlm_moe.data.reader import ShardReader
from openlm_moe.data.remote import ShardCache, read_bytes
from openlm_moe.data.shards import write_shard
from openlm_moe.errors import UserError

Maker = Callable[..., str]


@pytest.fixture
def upload(make_source: Maker) -> Iterator[Callable[..., str]]:
    """`upload(name, counts)` puts a source into fsspec's memory file system; returns its manifest's URL."""
    fs = fsspec.filesystem("memory")

    def put(name: str, counts: list[int]) -> str:
        folder = Path(make_source(name, counts)).parent
        for path in folder.iterdir():
            fs.pipe_file(f"/{name}/{path.name}", path.read_bytes())
        return f"memory://{name}/manifest.jsonl"

    yield put
    for name in fs.ls("/", detail=False):
        fs.rm(name, recursive=True)


def samples(source: str, **options: object) -> list[tuple[int, int]]:
    data = open_data([source], seq_len=4, **options)  # type: ignore[arg-type]
    return [(row[0], row[1]) for batch in data.batches(2) for row in batch["tokens"].tolist()]


def test_remote_data_read_as_local_ones(upload: Callable[..., str], tmp_path: Path, own_cache: Path) -> None:
    url = upload("far", [3, 4, 5])
    assert samples(url) == samples(str(tmp_path / "far" / "manifest.jsonl"))
    assert len(list((own_cache / "shards").glob("*.tar"))) == 3
    assert samples("memory://far/{00000..00002}.tar") == samples(url)


def test_workers_read_remote_data(upload: Callable[..., str]) -> None:
    data = open_data([upload("far", [8, 8])], seq_len=4)
    assert sum(len(batch["tokens"]) for batch in data.batches(4, workers=2)) == 16


def test_each_shard_is_downloaded_once_and_again_when_it_changed(
    upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload("far", [3, 4])
    fetched: list[str] = []
    get_file = fsspec.implementations.memory.MemoryFileSystem.get_file

    def counted(self: object, path: str, *args: object, **more: object) -> object:
        fetched.append(path)
        return get_file(self, path, *args, **more)

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "get_file", counted)
    first = samples(url)
    assert samples(url) == first and sorted(fetched) == ["/far/00000.tar", "/far/00001.tar"]
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/far/00000.tar", fs.cat_file("/far/00001.tar"))
    with pytest.raises(UserError, match="holds 4 samples but its manifest says 3"):
        samples(url)
    assert fetched[2:] == ["/far/00000.tar"]


@pytest.mark.parametrize("number", [0, 1])
def test_missing_remote_shard_is_found_before_any_download(
    upload: Callable[..., str], own_cache: Path, number: int
) -> None:
    url = upload("far", [3, 4])
    fsspec.filesystem("memory").rm(f"/far/0000{number}.tar")
    with pytest.raises(UserError, match=rf"shard memory://far/0000{number}\.tar does not exist"):
        samples(url)
    assert not list(own_cache.glob("shards/*.tar"))
    with pytest.raises(UserError, match=r"manifest memory://far/none\.jsonl does not exist"):
        samples("memory://far/none.jsonl")


def test_truncated_download_is_found(upload: Callable[..., str]) -> None:
    url = upload("far", [3])
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/far/00000.tar", fs.cat_file("/far/00000.tar")[:2000])
    with pytest.raises(UserError, match=r"shard memory://far/00000\.tar is truncated"):
        samples(url)


def test_cache_is_bounded_and_the_oldest_go(
    upload: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload("far", [2, 2, 2, 2])
    size = (tmp_path / "far" / "00000.tar").stat().st_size
    cache = ShardCache(tmp_path / "copies", limit_bytes=2 * size)
    (tmp_path / "copies").mkdir()
    for name, age in [("new.part", 3600), ("old.part", 48 * 3600)]:
        (tmp_path / "copies" / name).touch()
        os.utime(tmp_path / "copies" / name, (time.time() - age,) * 2)
    held = cache.open("memory://far/00000.tar")[0]
    for number in (1, 2, 3):
        time.sleep(0.01)
        os.close(cache.open(f"memory://far/0000{number}.tar")[0])
    assert len(list((tmp_path / "copies").glob("*.tar"))) == 2
    assert os.pread(held, size, 0) == (tmp_path / "far" / "00000.tar").read_bytes()
    os.close(held)
    assert [path.name for path in (tmp_path / "copies").glob("*.part")] == ["new.part"]
    monkeypatch.setattr(ShardCache, "_download", None)
    for number in (2, 3):
        os.close(cache.open(f"memory://far/0000{number}.tar")[0])


def test_run_survives_a_cache_smaller_than_its_data(
    upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(order, "WINDOW", 8)
    monkeypatch.setattr("openlm_moe.data.reader._OPEN_SHARDS", 1)
    url = upload("far", [4] * 6)
    size = (tmp_path / "far" / "00000.tar").stat().st_size
    assert sorted(samples(url, cache_bytes=size)) == [(shard, member) for shard in range(6) for member in range(4)]


def _open_slowly(folder: str, counter: str) -> None:
    def slow(url: str, part: str) -> None:
        with open(counter, "a") as file:
            file.write("x")
        time.sleep(0.3)
        Path(part).write_bytes(b"content")

    remote._run_pipe = slow  # type: ignore[assignment]
    descriptor, _ = ShardCache(Path(folder), 100, allow_pipe=True).open("pipe:slow")
    assert os.read(descriptor, 100) == b"content"


def test_processes_share_one_download(tmp_path: Path) -> None:
    context = get_context("fork")
    jobs = [
        context.Process(target=_open_slowly, args=(str(tmp_path / "copies"), str(tmp_path / "count"))) for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0] * 4
    assert (tmp_path / "count").read_text() == "x"


def test_pipes_are_refused_unless_allowed(make_source: Maker, tmp_path: Path) -> None:
    folder = Path(make_source("a", [3, 4])).parent
    source = f"pipe:cat {folder}/{{00000,00001}}.tar && touch {tmp_path}/ran"
    with pytest.raises(UserError, match=r"would run a shell command; .*--allow-pipe"):
        samples(source)
    assert not (tmp_path / "ran").exists()
    assert len(samples(source, allow_pipe=True)) == 6
    assert (tmp_path / "ran").exists()
    with pytest.raises(UserError, match=r"pipe:echo no such thing >&2; false ended with code 1: no such thing"):
        samples("pipe:echo no such thing >&2; false", allow_pipe=True)


def test_unknown_protocols_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"cannot open nowhere://x\.jsonl: Protocol not known"):
        read_bytes("nowhere://x.jsonl", "manifest")

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"cannot open s3://b/m\.jsonl: Install s3fs"):
        read_bytes("s3://b/m.jsonl", "manifest")


def test_passing_failures_are_retried(upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload("far", [3])
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    failures = iter([OSError("reset"), TimeoutError("slow")])
    cat_file = fsspec.implementations.memory.MemoryFileSystem.cat_file

    def flaky(self: object, path: str, **more: object) -> object:
        for failure in failures:
            raise failure
        return cat_file(self, path, **more)

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", flaky)
    assert read_bytes(url, "manifest").startswith(b'{"shard"')
    assert waits == [1, 2]
    failures = iter([OSError(f"number\n{number}") for number in range(5)])
    with pytest.raises(UserError, match=r"manifest memory://far/manifest\.jsonl cannot be read: number 4"):
        read_bytes(url, "manifest")
    assert waits == [1, 2, 1, 2, 4, 8]


def test_http(make_source: Maker, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's http file system needs aiohttp")
    folder = Path(make_source("a", [3, 4])).parent
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        assert samples(f"{base}/manifest.jsonl") == samples(str(folder / "manifest.jsonl"))
        data = open_data([f"{base}/{{00000,00001}}.tar"], seq_len=4, cache_dir=tmp_path / "other")
        assert sum(len(batch["tokens"]) for batch in data.batches(1, workers=2)) == 7
        with pytest.raises(UserError, match=r"shard http://.*/00009\.tar does not exist"):
            samples(f"{base}/00009.tar")
    finally:
        server.shutdown()
        server.server_close()


def test_each_window_is_fetched_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW", 8)
    started: list[set[str]] = []

    class Thread:
        def __init__(self, target: object, args: tuple[list[Shard]], daemon: bool) -> None:
            assert daemon
            self.shards = args[0]

        def start(self) -> None:
            started.append({shard.name for shard in self.shards})

    monkeypatch.setattr("openlm_moe.data.fetch.threading.Thread", Thread)
    shards = tuple(Shard(f"memory://far/{number}.tar", str(number)) for number in range(8))
    far = Source("far", shards, (4,) * 8)
    near = Source("near", (Shard("near.tar", "near"),), (4,))
    orders = [SourceOrder(source.counts, 3, number) for number, source in enumerate((far, near))]
    ahead = FetchAhead([far, near], orders, ShardReader())
    for position in range(32):
        ahead.note([position, 0])
    windows = [{str(shard) for shard in orders[0].window(index)[1]} for index in (0, 8, 16, 24, 32)]
    assert started == [windows[number] | windows[number + 1] for number in range(4)]


def test_local_data_need_no_cache_folder(
    make_source: Maker, upload: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(samples(make_source("a", [3, 5]))) == 8
    with pytest.raises(UserError, match=r"the cache folder .*/file/openlm-moe/shards cannot be written \(Not a dir"):
        samples(upload("far", [3]))


def test_file_urls_are_local(make_source: Maker, tmp_path: Path, own_cache: Path) -> None:
    manifest = make_source("a", [3, 4])
    assert samples(f"file://{manifest}") == samples(manifest)
    write_shard(tmp_path / "one.tar", np.arange(10).reshape(2, 5))
    assert samples(f"file://{tmp_path}/one.tar") == samples(f"{tmp_path}/one.tar")
    assert not list(own_cache.glob("shards/*.tar"))
