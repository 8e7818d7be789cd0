"""The embedded corpus: stable, whole, made once however many processes ask, and refused where it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openlm_moe.data import corpus
from openlm_moe.data.corpus import embedded_corpus, embedded_tokenizer, is_validation, library_texts
from openlm_moe.data.evaluation import open_evaluation
from openlm_moe.data.loader import open_data
from openlm_moe.data.ngram import perplexities
from openlm_moe.data.tokenizer import load_encoder, train_byte_bpe
from openlm_moe.errors import UserError

pytest.importorskip("tokenizers")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library: 40 modules of this package's own kind of text."""
    monkeypatch.setattr(corpus, "_LEAST_BYTES", 1000)
    monkeypatch.setattr(corpus, "VALIDATION_PERCENT", 20)
    folder = tmp_path / "lib"
    for number in range(40):
        path = folder / f"pack{number % 3}" / f"mod{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def function_{number}_{line}(x):\n    return x * {line}\n\n" for line in range(30)))
    return folder


def test_tests_packages_and_machine_files_are_left_out(library: Path) -> None:
    expected = set(library_texts(library))
    assert len(expected) == 40 and "pack0/mod0.py" in expected
    for name in [
        "test/a.py",
        "json/tests/a.py",
        "idlelib/idle_test/a.py",
        "site-packages/p/a.py",
        "dist-packages/a.py",
        "config-3.11-x86_64-linux-gnu/a.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("x = 1\n" * 100)
    (library / "latin.py").write_bytes(b"# \xe9\n")
    assert set(library_texts(library)) == expected
    assert list(library_texts(library)) == sorted(expected)


def test_split_is_fixed_by_the_path() -> None:
    # A change of these would move files between training and validation.
    assert [path for path in ("turtle.py", "pprint.py", "struct.py", "warnings.py") if not is_validation(path)] == []
    assert [path for path in ("ast.py", "json/decoder.py", "encodings/cp852.py") if is_validation(path)] == []
    drawn = sum(is_validation(f"module{number}.py") for number in range(10_000))
    assert 330 < drawn < 470


def test_every_token_is_in_order_and_documents_are_separated(library: Path) -> None:
    made = embedded_corpus(64, vocab_size=300, library=library)
    texts = library_texts(library)
    encoder = load_encoder(made.tokenizer)
    assert encoder.end_id == 0 and encoder.vocab_size == 300
    train_byte_bpe([text for path, text in texts.items() if not is_validation(path)], 300, library / "bpe.json")
    assert (library / "bpe.json").read_bytes() == Path(made.tokenizer).read_bytes()
    for manifest, want in ((made.train, False), (made.validation, True)):
        documents = [text for path, text in texts.items() if is_validation(path) is want]
        stream = np.concatenate([[*encoder.tokenizer.encode(text).ids, 0] for text in documents])
        (data,) = open_evaluation([manifest], seq_len=64, vocab_size=300)
        samples = np.concatenate([batch["tokens"] for batch in data.batches(16)])
        assert samples.shape == (len(stream) // 65, 65)
        assert (samples.ravel() == stream[: samples.size]).all()
        assert encoder.tokenizer.decode(stream[:-1].tolist(), skip_special_tokens=True) == "".join(documents)
    assert made.record["train_files"] + made.record["validation_files"] == 40  # type: ignore[operator]
    assert open_data([made.train], seq_len=64, vocab_size=300).sources[0].num_samples > 100


def test_same_sources_same_bytes_other_sources_other_folder(library: Path, tmp_path: Path) -> None:
    first = embedded_corpus(64, vocab_size=300, library=library, cache_dir=tmp_path / "one")
    again = embedded_corpus(64, vocab_size=300, library=library, cache_dir=tmp_path / "two")
    for path in sorted((tmp_path / "one").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
    assert first.record == again.record
    (library / "pack0" / "mod0.py").write_text("y = 2\n" * 400)
    changed = embedded_corpus(64, vocab_size=300, library=library, cache_dir=tmp_path / "one")
    assert changed.record["sha256"] != first.record["sha256"] and changed.train != first.train
    assert (
        embedded_corpus(32, vocab_size=300, library=library, cache_dir=tmp_path / "one").tokenizer == changed.tokenizer
    )


def test_second_use_makes_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded_corpus(64, vocab_size=300, library=library)
    monkeypatch.setattr(corpus, "train_byte_bpe", None)
    monkeypatch.setattr(corpus, "write_shard", None)
    assert embedded_corpus(64, vocab_size=300, library=library) == first


def test_interrupted_making_leaves_nothing(library: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded_corpus(64, vocab_size=300, library=library)
    left = [path.name for path in (own_cache / "corpus").glob("*/*")]
    assert sorted(left) == ["record.json", "seq_64.lock", "tokenizer.json", "train.npy", "validation.npy"]
    assert Path(embedded_corpus(64, vocab_size=300, library=library).train).exists()


def test_missing_sources_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python311\.zip holds only 0 characters of them; run a Python with its \.py"):
        embedded_corpus(64, library=tmp_path / "python311.zip")


def test_too_long_a_sequence_is_said(library: Path) -> None:
    with pytest.raises(UserError, match="train tokens, too few for seq_len 100000"):
        embedded_corpus(100_000, vocab_size=300, library=library)


PROGRAM = """
import sys, json
from openlm_moe.data import corpus
corpus._LEAST_BYTES = 1000
made = corpus.embedded_corpus(64, vocab_size=300, library=sys.argv[1])
print(json.dumps([made.train, made.record]))
"""


def test_processes_at_once_make_it_once(library: Path, own_cache: Path, repo_root: Path) -> None:
    environment = {**__import__("os").environ, "PYTHONPATH": f"{repo_root}:{repo_root / 'kernels'}"}
    command = [sys.executable, "-c", PROGRAM, str(library)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    answers = [json.loads(out) for out, _ in outputs]
    assert answers[0] == answers[1] == answers[2] and Path(answers[0][0]).exists()
    assert not list((own_cache / "corpus").rglob(".*"))


def test_the_real_one(own_cache: Path, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    started = time.process_time()
    made = embedded_corpus(256)
    assert time.process_time() - started < 60
    assert 2_000_000 < made.record["train_tokens"] < 6_000_000  # type: ignore[operator]
    assert 50_000 < made.record["validation_tokens"] < 400_000  # type: ignore[operator]
    assert embedded_tokenizer() == made.tokenizer
    encoder = load_encoder(made.tokenizer)
    assert encoder.vocab_size == 4096
    code = "def f(self):\n\treturn 'é' # 3.14\n\n"
    assert encoder.tokenizer.decode(encoder.tokenizer.encode(code).ids) == code
    train, validation = (
        np.concatenate([batch["tokens"] for batch in data.batches(256)])
        for data in open_evaluation([made.train, made.validation], seq_len=256, vocab_size=4096)
    )
    found = perplexities(train, validation, 4096)
    assert 30 < found["bigram"] < 200 < found["unigram"] < 1500
