"""A larger real text than the embedded corpus: core C sources of Debian's linux-source package, in the cache folder.

    apt-get download linux-source-6.1
    python -m results.linux_corpus linux-source-6.1_*.deb

A BPE of 4096 entries is trained on the training files, and `openlm_moe.data.prepare` makes the shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from openlm_moe.data.cache import cache_root
from openlm_moe.data.corpus import VOCAB_SIZE, is_validation
from openlm_moe.data.prepare import prepare
from openlm_moe.data.tokenizer import train_byte_bpe

FOLDERS = ("kernel", "mm", "fs", "lib", "block", "ipc", "security")
SEQ_LEN = 128


def linux_corpus(seq_len: int) -> tuple[str, str, dict[str, Any]]:
    """(training manifest, validation manifest, what the corpus is). Ends with a line of advice where it is not made."""
    folder = _folder()
    if seq_len != SEQ_LEN or not (folder / "record.json").exists():
        raise SystemExit(f"{folder} holds no linux corpus for sequences of {seq_len}; make it: {__doc__.strip()}")
    record = json.loads((folder / "record.json").read_text())
    return str(folder / "train" / "manifest.jsonl"), str(folder / "validation" / "manifest.jsonl"), record


def make(package: Path) -> dict[str, Any]:
    """Unpacks `package`, tokenises its files and writes shards; returns the record that says what they are."""
    folder = _folder()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "text").mkdir(parents=True)
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        for path, text in _sources(next(Path(unpacked).rglob("linux-source-*.tar.xz"))):
            splits["validation" if is_validation(path) else "train"].append(text)
    train_byte_bpe(splits["train"], VOCAB_SIZE, folder / "tokenizer.json")
    record: dict[str, Any] = {
        "name": "linux",
        "package": package.name,
        "package_sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
        "folders": FOLDERS,
        "vocab_size": VOCAB_SIZE,
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
    }
    for split, texts in splits.items():
        lines = folder / "text" / f"{split}.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([str(lines)], folder / split, tokenizer=str(folder / "tokenizer.json"), seq_len=SEQ_LEN)
        made = json.loads((folder / split / "prepare.json").read_text())
        record |= {f"{split}_files": len(texts), f"{split}_tokens": made["tokens"]}
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def _folder() -> Path:
    return cache_root() / "linux_corpus"


def _sources(archive: Path) -> list[tuple[str, str]]:
    """(path below the tree's root, text) of the C files of FOLDERS, sorted by path."""
    found = []
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path.endswith((".c", ".h")) and path.startswith(tuple(f"{f}/" for f in FOLDERS)):
                file = tar.extractfile(member)
                assert file is not None
                found.append((path, file.read().decode(errors="replace")))
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps(make(Path(sys.argv[1])), indent=1))
