"""The embedded default corpus: the sources of the running Python's standard library, real text on every machine.

Tests and installed packages are left out. The text is tokenised once with a byte-level BPE trained on its training
part, split by file, packed, and written as ordinary shards and manifests into the cache folder, under a name made of
the content's hash: another Python gives another folder, the same sources the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openlm_moe.data.cache import cache_root, locked, writable
from openlm_moe.data.manifest import write_manifest
from openlm_moe.data.packing import even_parts, pack
from openlm_moe.data.shards import write_shard
from openlm_moe.data.tokenizer import load_encoder, train_byte_bpe
from openlm_moe.errors import UserError

log = logging.getLogger(__name__)
VOCAB_SIZE = 4096
SAMPLES_PER_SHARD = 2048
VALIDATION_PERCENT = 4
_FORMAT = 1
_LEAST_BYTES = 2_000_000
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written when Python is built or installed: they hold the machine's paths and flags, not the library's text.
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# Character tables that are near copies of one another: one of them in validation would measure memory, not modelling.
_NEAR_COPIES = "encodings/"


@dataclass(frozen=True)
class Corpus:
    """Where the corpus lies, as the loader takes it, and what it is: see record.json for the keys of `record`."""

    train: str
    validation: str
    tokenizer: str
    record: dict[str, object]


def embedded_corpus(
    seq_len: int,
    cache_dir: str | os.PathLike[str] | None = None,
    vocab_size: int = VOCAB_SIZE,
    library: str | os.PathLike[str] | None = None,
) -> Corpus:
    """The corpus packed for `seq_len`, made on first use (some ten seconds) and found in the cache afterwards.

    May be called by any number of processes at once: one makes it, the others wait. `library` is the folder of
    sources (default: the running Python's). Raises `UserError` where there are no sources on disk.
    """
    tokens = _tokenised(cache_dir, vocab_size, library)
    packed = _made_once(tokens / f"seq_{seq_len}", lambda folder: _pack(tokens, seq_len, folder))
    record = json.loads((tokens / "record.json").read_text())
    return Corpus(
        str(packed / "train" / "manifest.jsonl"),
        str(packed / "stdlib_validation" / "manifest.jsonl"),
        str(tokens / "tokenizer.json"),
        record,
    )


def embedded_tokenizer(cache_dir: str | os.PathLike[str] | None = None) -> str:
    """The path of the embedded corpus's tokenizer file, made if need be. Raises `UserError` as `embedded_corpus`."""
    return str(_tokenised(cache_dir, VOCAB_SIZE, None) / "tokenizer.json")


def library_texts(library: Path) -> dict[str, str]:
    """Relative path -> text of every Python file of the library, sorted. Raises `UserError` where they are missing."""
    texts: dict[str, str] = {}
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES):
                try:
                    texts[path.relative_to(library).as_posix()] = path.read_bytes().decode()
                except (UnicodeDecodeError, OSError):
                    continue
    size = sum(map(len, texts.values()))
    if size < _LEAST_BYTES:
        raise UserError(
            f"the embedded corpus needs the standard library's sources, but {library} holds only {size} characters of "
            "them; run a Python with its .py files, or give --train-data or --dataset-manifest"
        )
    return dict(sorted(texts.items()))


def content_digest(texts: dict[str, str], settings: dict[str, object]) -> str:
    """SHA-256 over the settings and every file's path and text."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, text in texts.items():
        digest.update(json.dumps([path, is_validation(path), hashlib.sha256(text.encode()).hexdigest()]).encode())
    return digest.hexdigest()


def is_validation(path: str) -> bool:
    """Whether the file at this relative path belongs to validation: fixed by the path alone."""
    if path.startswith(_NEAR_COPIES):
        return False
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100 < VALIDATION_PERCENT


def _tokenised(
    cache_dir: str | os.PathLike[str] | None, vocab_size: int, library: str | os.PathLike[str] | None
) -> Path:
    texts = library_texts(Path(library or sysconfig.get_path("stdlib")))
    settings = {"format": _FORMAT, "vocab_size": vocab_size, "validation_percent": VALIDATION_PERCENT}
    digest = content_digest(texts, settings)
    folder = writable(cache_root(cache_dir) / "corpus") / digest[:16]
    return _made_once(folder, lambda aside: _tokenise(texts, settings, digest, aside))


def _tokenise(texts: dict[str, str], settings: dict[str, object], digest: str, folder: Path) -> None:
    log.info("tokenising the embedded corpus (Python's standard library, %d files), once", len(texts))
    split = {
        "train": [text for path, text in texts.items() if not is_validation(path)],
        "validation": [text for path, text in texts.items() if is_validation(path)],
    }
    vocab_size = settings["vocab_size"]
    assert isinstance(vocab_size, int)
    train_byte_bpe(split["train"], vocab_size, folder / "tokenizer.json")
    encoder = load_encoder(folder / "tokenizer.json")
    record: dict[str, object] = {**settings, "sha256": digest, "tokenizer_sha256": encoder.digest}
    for name, documents in split.items():
        tokens = np.concatenate(list(encoder.encode(documents)))
        np.save(folder / f"{name}.npy", tokens)
        record[f"{name}_files"] = len(documents)
        record[f"{name}_tokens"] = len(tokens)
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    # The package's threads have run: unless told off, it would complain when loader workers are forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _pack(tokens: Path, seq_len: int, folder: Path) -> None:
    for split, target in (("train", folder / "train"), ("validation", folder / "stdlib_validation")):
        stream = np.load(tokens / f"{split}.npy", allow_pickle=False)
        samples = np.concatenate(list(pack([stream], seq_len + 1)) or [np.empty((0, seq_len + 1), stream.dtype)])
        if not len(samples):
            raise UserError(f"the embedded corpus has {len(stream)} {split} tokens, too few for seq_len {seq_len}")
        entries = []
        for number, part in enumerate(even_parts(len(samples), SAMPLES_PER_SHARD)):
            name = f"{number:08d}"
            write_shard(target / f"{name}.tar", samples[part.start : part.stop])
            entries.append((name, len(part)))
        write_manifest(target / "manifest.jsonl", entries)


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there; made aside and renamed, so that it is whole or absent.

    Of several processes at once one makes it and the others wait.
    """
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            try:
                make(aside)
                os.chmod(aside, 0o755)
                with contextlib.suppress(OSError):  # another process was first, on a file system without locks
                    os.rename(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder
