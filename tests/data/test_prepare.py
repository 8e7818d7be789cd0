"""`data.prepare`: the same shards from one process, many workers or an array of tasks, and restartable at any point."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openlm_moe.data import groups
from openlm_moe.data.evaluation import open_evaluation
from openlm_moe.data.prepare import main, merge, prepare
from openlm_moe.data.tokenizer import load_encoder, train_byte_bpe
from openlm_moe.errors import UserError

pytest.importorskip("tokenizers")
DOCUMENTS = [f"document {n}: " + " ".join(f"word{n * k % 17}" for k in range(n % 40)) for n in range(120)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    train_byte_bpe(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    """A folder with all 120 documents, ten a file, in every format and compression."""
    zstandard = pytest.importorskip("zstandard")
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = tmp_path / "inputs"
    (folder / "deep").mkdir(parents=True)
    parts = [DOCUMENTS[start : start + 10] for start in range(0, 120, 10)]
    lines = ["".join(json.dumps({"text": text, "id": 1}) + "\n" for text in part).encode() for part in parts]
    for number in range(0, 3):
        (folder / f"{number}.jsonl").write_bytes(lines[number])
    (folder / "deep" / "3.jsonl.gz").write_bytes(gzip.compress(lines[3]))
    (folder / "deep" / "4.jsonl.zst").write_bytes(zstandard.compress(lines[4]) + zstandard.compress(lines[5]))
    parquet.write_table(pyarrow.table({"text": parts[6] + parts[7], "n": range(20)}), folder / "6.parquet")
    for number in (8, 9):
        (folder / f"{number}.json").write_bytes(lines[number])
    for number, text in enumerate(DOCUMENTS[100:]):
        (folder / "deep" / f"text{number}.txt").write_text(text)
    (folder / "ignored.bin").write_bytes(b"\xff")
    (folder / ".hidden.txt").write_text("hidden")
    return str(folder)


OPTIONS = dict(seq_len=16, shard_size=20, group_bytes=2000, seed=5)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def test_every_document_arrives_in_whole_samples(inputs: str, tokenizer: str, tmp_path: Path) -> None:
    prepare([inputs], tmp_path / "out", tokenizer=tokenizer, **OPTIONS)
    encoder = load_encoder(tokenizer)
    record = json.loads((tmp_path / "out" / "prepare.json").read_text())
    streams = [[*encoder.tokenizer.encode(text).ids, 0] for text in DOCUMENTS]
    assert record["documents"] == 120 and record["tokens"] == sum(map(len, streams))
    (data,) = open_evaluation([str(tmp_path / "out" / "manifest.jsonl")], seq_len=16, vocab_size=300)
    samples = np.concatenate([batch["tokens"] for batch in data.batches(64)])
    assert record["samples"] == len(samples) and record["num_groups"] > 2
    assert 0 <= record["tokens"] - samples.size < record["num_groups"] * 17
    tokens = Counter(samples.ravel().tolist())
    lost = Counter(token for stream in streams for token in stream) - tokens
    assert sum(lost.values()) == record["tokens"] - samples.size and not tokens - Counter(
        np.concatenate(streams).tolist()
    )


def test_one_group_keeps_the_stream(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=tokenizer, seq_len=16, text_key="body")
    encoder = load_encoder(tokenizer)
    stream = np.concatenate([[*encoder.tokenizer.encode(text).ids, 0] for text in DOCUMENTS])
    whole = stream[: len(stream) // 17 * 17].reshape(-1, 17)
    (data,) = open_evaluation([str(tmp_path / "out" / "manifest.jsonl")], seq_len=16)
    samples = np.concatenate([batch["tokens"] for batch in data.batches(64)])
    assert sorted(samples.tolist()) == sorted(whole.tolist())
    assert samples.tolist() != whole.tolist()


def test_tasks_and_workers_change_nothing(inputs: str, tokenizer: str, tmp_path: Path) -> None:
    prepare([inputs], tmp_path / "one", tokenizer=tokenizer, **OPTIONS)
    expected = files(tmp_path / "one")
    assert len([name for name in expected if name.endswith(".tar")]) > 5
    for task in (2, 0, 1):
        prepare([inputs], tmp_path / "three", tokenizer=tokenizer, task_index=task, num_tasks=3, **OPTIONS)
        assert not (tmp_path / "three" / "manifest.jsonl").exists()
    merge(tmp_path / "three")
    assert files(tmp_path / "three") == expected
    for task in range(12):  # more tasks than groups
        prepare([inputs], tmp_path / "many", tokenizer=tokenizer, task_index=task, num_tasks=12, **OPTIONS)
    merge(tmp_path / "many")
    assert files(tmp_path / "many") == expected


def test_worker_processes_change_nothing(inputs: str, tokenizer: str, tmp_path: Path) -> None:
    prepare([inputs], tmp_path / "one", tokenizer=tokenizer, **OPTIONS)
    prepare([inputs], tmp_path / "two", tokenizer=tokenizer, workers=2, **OPTIONS)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_interrupted_run_goes_on(inputs: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare([inputs], tmp_path / "whole", tokenizer=tokenizer, **OPTIONS)
    written: list[str] = []
    write_shard = groups.write_shard

    def dying(path: Path, samples: object) -> str:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path.name)
        return write_shard(path, samples)

    out = tmp_path / "out"
    monkeypatch.setattr(groups, "write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        prepare([inputs], out, tokenizer=tokenizer, **OPTIONS)
    assert not (out / "manifest.jsonl").exists()
    with pytest.raises(UserError, match=r"groups are not done \(group .*run their tasks again, then --merge"):
        merge(out)
    done = [name for name in written if (out / ".prepare" / f"{name[:5]}.json").exists()]
    assert done
    torn = out / f".{len(list((out / '.prepare').glob('0*.json'))):05d}-00000.tar.killed"
    torn.touch()
    again: list[str] = []
    monkeypatch.setattr(
        groups, "write_shard", lambda path, samples: again.append(path.name) or write_shard(path, samples)
    )
    prepare([inputs], out, tokenizer=tokenizer, **OPTIONS)
    assert not set(again) & set(done) and not torn.exists()
    assert files(out) == files(tmp_path / "whole")


def test_lost_and_damaged_shards_are_found_and_made_again(inputs: str, tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([inputs], out, tokenizer=tokenizer, **OPTIONS)
    expected = files(out)
    first = next(out.glob("*.tar"))
    first.unlink()
    with pytest.raises(UserError, match=r"1 of .* groups are not done"):
        merge(out)
    prepare([inputs], out, tokenizer=tokenizer, **OPTIONS)
    assert files(out) == expected
    os.truncate(first, first.stat().st_size - 512)
    prepare([inputs], out, tokenizer=tokenizer, **OPTIONS)
    assert files(out) == expected
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.write_bytes(data)
    with pytest.raises(UserError, match=rf"shard {first} was changed or damaged"):
        merge(out)


def test_even_shards(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=tokenizer, seq_len=16, shard_size=20)
    counts = [json.loads(line)["num_sequences"] for line in (tmp_path / "out" / "manifest.jsonl").open()]
    assert max(counts) <= 20 and len(counts) > 8
    assert min(counts) > 0.9 * max(counts) - 1


def test_groups_take_every_file_once_in_the_seeds_order() -> None:
    inputs = tuple((f"{number}.txt", 10 * number) for number in range(30))

    def groups_of(seed: int) -> list[tuple[str, ...]]:
        return groups.Recipe(inputs, "", 0, 16, 20, seed, "auto", "text", group_bytes=500).groups()

    found = groups_of(1)
    assert sorted(name for group in found for name in group) == sorted(name for name, _ in inputs)
    sizes = [sum(dict(inputs)[name] for name in group) for group in found]
    assert all(500 <= size < 790 for size in sizes[:-1]) and len(sizes) > 4
    assert groups_of(1) == found != groups_of(2)
    assert [name for group in found for name in group] != [name for name, _ in inputs]


def test_seed_orders_and_settings_are_kept_apart(inputs: str, tokenizer: str, tmp_path: Path) -> None:
    prepare([inputs], tmp_path / "a", tokenizer=tokenizer, **OPTIONS)
    prepare([inputs], tmp_path / "b", tokenizer=tokenizer, **{**OPTIONS, "seed": 6})
    assert files(tmp_path / "a") != files(tmp_path / "b")
    with pytest.raises(UserError, match=r"was begun with another seed \(5, now 6\); choose another --output"):
        prepare([inputs], tmp_path / "a", tokenizer=tokenizer, **{**OPTIONS, "seed": 6})
    (Path(inputs) / "new.txt").write_text("new")
    with pytest.raises(UserError, match="was begun with another inputs; choose"):
        prepare([inputs], tmp_path / "a", tokenizer=tokenizer, **OPTIONS)
    shutil.rmtree(tmp_path / "a" / ".prepare")
    with pytest.raises(UserError, match="holds shards that were not made here"):
        prepare([inputs], tmp_path / "a", tokenizer=tokenizer, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl line 1 has no text under 'text'; name the key by --text-key"),
        ("a.jsonl", b'\n["x"]\n', "a.jsonl line 2 has no text under 'text'"),
        ("a.txt", b"ok \xff\xfe", "a.txt is not UTF-8 text \\(byte 3\\)"),
        ("a.jsonl.zst", b"not zstd", "a.jsonl.zst cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 999, mtime=0)[:20], "a.jsonl.gz cannot be read"),
        ("a.parquet", b"not parquet", "a.parquet cannot be read"),
        ("a.bin", b"x", "a.bin has no known ending; name the format by --format"),
        ("a.txt", b"short", "tokens, too few for a sample of 17"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = [str(tmp_path / name), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer, "--seq-len", "16"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("prepare: error: ") and error.count("\n") == 1
    assert __import__("re").search(message, error)
    assert not (tmp_path / "out" / "manifest.jsonl").exists()


def test_parquet_column_is_named(tmp_path: Path, tokenizer: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text' \(it has body, n\)"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", tokenizer=tokenizer)
    parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"row 1 has no text in column 'text'"):
        prepare([str(tmp_path / "b.parquet")], tmp_path / "out2", tokenizer=tokenizer)


def test_bad_arguments(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x")
    source, out = str(tmp_path / "a.txt"), str(tmp_path / "out")
    for arguments, message in [
        (["--output", out], "needs INPUT files and --tokenizer"),
        ([source, "--output", out], "needs INPUT files and --tokenizer"),
        ([source, "--output", out, "--tokenizer", tokenizer, "--task-index", "2", "--num-tasks", "2"], "not below"),
        ([source, "--output", out, "--tokenizer", tokenizer, "--seq-len", "0"], "must be at least 1"),
        ([f"{tmp_path}/none*", "--output", out, "--tokenizer", tokenizer], "no input file matches"),
        (["--merge", "--output", out], "holds nothing to merge"),
        ([source, "--output", source, "--tokenizer", tokenizer], "cannot be written"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([source, "--output", out, "--tokeniser", tokenizer])
    assert caught.value.code == 2 and "did you mean --tokenizer?" in capsys.readouterr().err


def test_patterns_and_remote_inputs(tokenizer: str, tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for number in range(3):
        fs.pipe_file(f"/texts/{number}.txt", " ".join(DOCUMENTS[number * 40 :][:40]).encode())
        (tmp_path / f"{number}.txt").write_bytes(fs.cat_file(f"/texts/{number}.txt"))
    options = dict(tokenizer=tokenizer, seq_len=16, seed=1)
    prepare(["memory://texts/*.txt"], tmp_path / "far", **options)
    prepare([f"{tmp_path}/[0-2].txt", str(tmp_path / "0.txt")], tmp_path / "near", **options)
    fs.rm("/texts", recursive=True)
    assert files(tmp_path / "far")["manifest.jsonl"] == files(tmp_path / "near")["manifest.jsonl"]
    assert files(tmp_path / "far")["00000-00000.tar"] == files(tmp_path / "near")["00000-00000.tar"]


def test_the_command(tokenizer: str, inputs: str, tmp_path: Path, run: Callable) -> None:
    output = ["--output", tmp_path / "out"]
    done = run(
        [sys.executable, "-m", "openlm_moe.data.prepare", inputs, "--tokenizer", tokenizer, "--seq-len", 16, *output],
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    assert "120 documents" in done.stderr and (tmp_path / "out" / "manifest.jsonl").exists()
