"""Shards: what is written can be read, every damage is told in one line, and nothing but token lists is accepted."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openlm_moe.data.manifest import Shard
from openlm_moe.data.reader import ShardReader
from openlm_moe.data.shards import check_whole, decode_sample, index_shard, write_shard
from openlm_moe.errors import UserError

SAMPLES = np.arange(15).reshape(3, 5)


def read_all(path: str, data_key: str = "auto") -> list[list[int]]:
    reader, shard = ShardReader(data_key), Shard(path, "x")
    return [reader.read(shard, member).tolist() for member in range(reader.count(shard))]


def test_round_trip_and_bytes_fixed_by_content(tmp_path: Path) -> None:
    digests = {write_shard(tmp_path / name, SAMPLES) for name in ("a.tar", "b.tar")}
    assert len(digests) == 1
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert read_all(str(tmp_path / "a.tar")) == SAMPLES.tolist()


def test_webdataset_reads_what_is_written(tmp_path: Path) -> None:
    import webdataset

    write_shard(tmp_path / "a.tar", SAMPLES)
    samples = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())
    assert [sample["json.gz"] for sample in samples] == SAMPLES.tolist()
    assert len({sample["__key__"] for sample in samples}) == 3


def test_open_lms_three_kinds_of_samples(raw_shard: Callable[..., str]) -> None:
    kinds = {
        "json.gz": gzip.compress(b"[1, 2, 3]"),
        "json": b"[1, 2, 3]",
        "txt": b"[1, 2, 3]",
        "TXT": b"[1, 2, '<|endoftext|>']",
    }
    found = {kind: read_all(raw_shard([(f"dir/k.{kind}", data)], f"{kind}.tar")) for kind, data in kinds.items()}
    assert found == {"json.gz": [[1, 2, 3]], "json": [[1, 2, 3]], "txt": [[1, 2, 3]], "TXT": [[1, 2, 0]]}


def test_only_the_samples_suffix_counts(raw_shard: Callable[..., str]) -> None:
    path = raw_shard([("a.txt", b"[1]"), ("a.json", b"[2]"), ("a.cls", b"0"), ("README", b""), ("b.txt", b"[3]")])
    assert read_all(path) == [[1], [3]]
    assert read_all(path, "json") == [[2]]
    assert read_all(raw_shard([("a.json.gz", gzip.compress(b"[4]"))], "gz.tar"), "json") == [[4]]
    with pytest.raises(UserError, match=r"no sample with suffix txt; check --data-key"):
        read_all(raw_shard([("a.json", b"[2]")], "json.tar"), "txt")
    with pytest.raises(UserError, match=r"'npy' is not one of auto, json\.gz, json, txt"):
        read_all(path, "npy")


def test_equal_keys_and_long_names_are_samples_of_their_own(raw_shard: Callable[..., str]) -> None:
    long = "d" * 90 + "/" + "k" * 200
    path = raw_shard([("a.json", b"[1]"), ("a.json", b"[2]"), (f"{long}.json", b"[3]")])
    assert read_all(path) == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("data", "suffix", "message"),
    [
        (b"[1, 2", "json", "cannot be decoded as json"),
        (b"not gzip", "json.gz", "cannot be decoded as json.gz"),
        (gzip.compress(b"[1, 2, 3]", mtime=0)[:-9], "json.gz", "cannot be decoded"),
        (b"\xff\xfe", "txt", "cannot be decoded as txt"),
        (b'{"tokens": [1]}', "json", "is a dict, not a list"),
        (b"[1, 2.5]", "json", "holds 2.5, which is no token id"),
        (b"[1, true]", "json", "holds True, which is no token id"),
        (b"[1, 'word']", "txt", "holds 'word', which is no token id"),
        (b"[1, null]", "json", "holds None"),
        (b"[[1, 2]]", "json", r"holds \[1, 2\]"),
        (b"[99999999999999999999]", "json", "beyond 64 bits"),
        (b"__import__('os').getcwd()", "txt", "cannot be decoded as txt"),
        (pickle.dumps([1, 2, 3]), "json", "cannot be decoded as json"),
    ],
)
def test_malformed_samples_are_named(data: bytes, suffix: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        decode_sample(data, suffix, "sample 3 of shard s.tar")
    assert str(caught.value).startswith("sample 3 of shard s.tar") and "\n" not in str(caught.value)


def test_pickled_members_are_no_samples(raw_shard: Callable[..., str]) -> None:
    path = raw_shard([("a.pyd", pickle.dumps([1])), ("a.pickle", pickle.dumps([1])), ("a.pth", b"x")])
    with pytest.raises(UserError, match="holds no sample"):
        read_all(path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path / "whole.tar", SAMPLES)
    data = (tmp_path / "whole.tar").read_bytes()
    end = index_shard(io.BytesIO(data), "auto", "x").extents[-1].sum()
    needed = -(-end // 512) * 512 + 1024  # the last member padded to a block, then the end mark
    assert len(index_shard(io.BytesIO(data[:needed]), "auto", "x")) == 3
    for size in [1, 100, 511, 512, 600, 1024, 1100, 1536, 2048, 2500, needed - 1024, needed - 512, needed - 1]:
        with pytest.raises(UserError, match=r"x (is truncated|is cut off)"):
            index_shard(io.BytesIO(data[:size]), "auto", "x")
        (tmp_path / "cut.tar").write_bytes(data[:size])
        with pytest.raises(UserError, match=r"cut\.tar is truncated"):
            check_whole(str(tmp_path / "cut.tar"))


def test_damaged_header_in_the_middle_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", SAMPLES)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[1024 + 150] ^= 0x1  # the checksum of the second member
    with pytest.raises(UserError, match="x is cut off or damaged after sample 1"):
        index_shard(io.BytesIO(bytes(data)), "auto", "x")


def test_what_is_no_shard_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").touch()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"x" * 3000))
    for name, message in [
        ("none.tar", "does not exist; check the path, or the manifest"),
        ("empty.tar", "is empty"),
        ("a.tar.gz", "is gzip-compressed as a whole"),
        ("", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            check_whole(str(tmp_path / name))


def test_index_is_kept_and_renewed_when_the_shard_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar"
    write_shard(path, SAMPLES)
    assert len(read_all(str(path))) == 3
    with monkeypatch.context() as patch:
        patch.setattr("openlm_moe.data.reader.index_shard", None)
        assert len(read_all(str(path))) == 3
    write_shard(path, SAMPLES[:2])
    assert len(read_all(str(path))) == 2
    for saved in (own_cache / "indices").iterdir():
        for broken in (b"broken", saved.read_bytes()[:200]):
            saved.write_bytes(broken)
            assert len(read_all(str(path))) == 2


def test_manifest_that_counts_wrong_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", SAMPLES)
    for count in (2, 4):
        with pytest.raises(UserError, match=rf"a\.tar holds 3 samples but its manifest says {count}"):
            ShardReader().read(Shard(str(tmp_path / "a.tar"), "a", count), 0)


def test_reader_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openlm_moe.data.reader._OPEN_SHARDS", 2)
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", SAMPLES + number)
    reader = ShardReader()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(2):
        for number in range(4):
            assert (
                reader.read(Shard(str(tmp_path / f"{number}.tar"), "x"), 1).tolist() == (SAMPLES[1] + number).tolist()
            )
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before + 2
    reader.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def samples():  # type: ignore[no-untyped-def]
        yield SAMPLES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "a.tar", samples())
    assert list(tmp_path.iterdir()) == []


def test_tar_members_hold_json(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", SAMPLES)
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
        assert all(member.name.endswith(".json.gz") and member.mtime == 0 for member in members)
        first = tar.extractfile(members[0])
        assert first is not None and json.loads(gzip.decompress(first.read())) == SAMPLES[0].tolist()
