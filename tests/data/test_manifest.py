"""Manifests and what a source on the command line means."""

from __future__ import annotations

from pathlib import Path

import pytest

from openlm_moe.data.manifest import Source, expand_source, read_manifest, write_manifest
from openlm_moe.errors import UserError


def names(text: str) -> list[str]:
    return [shard.url for shard in expand_source(text)]


def test_both_ages_of_manifests(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_text('{"shard": "a", "num_sequences": 3}\n\n{"shard": "b.tar", "num_chunks": 4}\n')
    assert [(s.url, s.name, s.count) for s in read_manifest(str(path))] == [
        (f"{tmp_path}/a.tar", "a", 3),
        (f"{tmp_path}/b.tar", "b", 4),
    ]


def test_written_manifest_is_open_lms(tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.jsonl", [("x", 2), ("y", 1)])
    text = '{"shard": "x", "num_sequences": 2}\n{"shard": "y", "num_sequences": 1}\n'
    assert (tmp_path / "manifest.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no shard"),
        ('{"shard": "a", "num_sequences": 1}\n{"shard": ', "line 2 is not"),
        ('{"shard": "a"}', "line 1 is not"),
        ("[1]", "line 1 is not"),
        ('{"shard": "a", "num_sequences": -1}', "line 1 has shard 'a' with -1 samples"),
        ('{"shard": "a", "num_sequences": "3"}', "line 1 has shard 'a' with '3' samples"),
        ('{"shard": 3, "num_sequences": 3}', "line 1 has shard 3"),
        ('{"shard": "a", "num_sequences": 1}\n' * 2, "names 1 shards more than once"),
    ],
)
def test_malformed_manifests_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_manifest(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest .*/none\.jsonl does not exist"):
        read_manifest(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="is a shell command"):
        read_manifest("pipe:cat manifest.jsonl")


def test_braces_and_joined_parts() -> None:
    assert names("d/{00..02}.tar::e/{x,y}.tar") == ["d/00.tar", "d/01.tar", "d/02.tar", "e/x.tar", "e/y.tar"]
    assert names("s3://b/{0..1}.tar::plain.tar") == ["s3://b/0.tar", "s3://b/1.tar", "plain.tar"]
    with pytest.raises(UserError, match="cannot expand the braces in"):
        names("d/{0..1.tar")


def test_counts_come_from_a_manifest_beside(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/{{a,b}}.tar"
    assert [shard.count for shard in expand_source(pattern)] == [None, None]
    write_manifest(tmp_path / "manifest.jsonl", [("c", 1), ("b", 2), ("a", 3)])
    assert [shard.count for shard in expand_source(pattern)] == [3, 2]
    assert [shard.count for shard in expand_source(f"{tmp_path}/{{a,z}}.tar")] == [None, None]


def test_digest_follows_names_and_counts_not_the_folder() -> None:
    def digest(folder: str, *pairs: tuple[str, int]) -> str:
        shards = tuple(expand_source("::".join(f"{folder}/{name}.tar" for name, _ in pairs)))
        return Source("text", shards, tuple(count for _, count in pairs)).digest()

    base = digest("d", ("a", 1), ("b", 2))
    assert digest("elsewhere", ("a", 1), ("b", 2)) == base
    assert len({base, digest("d", ("a", 2), ("b", 1)), digest("d", ("b", 2), ("a", 1)), digest("d", ("a", 1))}) == 4
