"""Tar shards of token samples, as open_lm and webdataset write them: written whole, indexed once, read by member.

A member `key.json.gz`, `key.json` or `key.txt` is one sample: a list of token ids, seq_len + 1 of them.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from openlm_moe.data.cache import write_atomically
from openlm_moe.errors import UserError

SAMPLE_SUFFIXES = ("json.gz", "json", "txt")
END_OF_TEXT = "<|endoftext|>"
_KEY_AND_SUFFIX = re.compile(r"^(?:.*/)?[^./]+\.([^/]*)$")
_END_MARKER_BYTES = 1024


@dataclass(frozen=True)
class ShardIndex:
    """Where the samples of one shard lie. `extents`: (n, 2) int64, byte offset and size of each member."""

    extents: np.ndarray
    suffix: str

    def __len__(self) -> int:
        return len(self.extents)


def sample_suffixes(data_key: str) -> tuple[str, ...]:
    """The member suffixes that `--data-key` admits: `auto` takes any; `json` and `json.gz` stand for each other."""
    if data_key == "auto":
        return SAMPLE_SUFFIXES
    if data_key in ("json", "json.gz"):
        return ("json.gz", "json")
    if data_key == "txt":
        return ("txt",)
    raise UserError(f"--data-key {data_key!r} is not one of auto, {', '.join(SAMPLE_SUFFIXES)}")


def write_shard(path: Path, samples: Iterable[np.ndarray]) -> str:
    """Writes `samples` (each 1-D integers) as one `.json.gz` shard, atomically; returns the file's SHA-256.

    The bytes depend on the samples alone: no time stamps, keys from content.
    """
    try:
        from webdataset import TarWriter
    except ImportError as error:
        raise UserError('writing shards needs webdataset: pip install "openlm-moe[data]"') from error
    buffer = io.BytesIO()
    with TarWriter(buffer, encoder=False, mtime=0) as tar:
        for number, sample in enumerate(samples):
            text = json.dumps(sample.tolist()).encode()
            key = f"{number:08d}-{hashlib.sha256(text).hexdigest()[:16]}"
            tar.write({"__key__": key, "json.gz": gzip.compress(text, compresslevel=6, mtime=0)})
    write_atomically(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def check_whole(path: str) -> None:
    """Raises `UserError` where the local shard `path` is missing, no tar, or lacks its end: stat and three reads."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(512)
            file.seek(max(0, size - _END_MARKER_BYTES))
            tail = file.read()
    except FileNotFoundError as error:
        raise UserError(f"shard {path} does not exist; check the path, or the manifest that names it") from error
    except OSError as error:
        raise UserError(f"shard {path} cannot be read: {error.strerror}") from error
    if size == 0:
        raise UserError(f"shard {path} is empty (0 bytes); write or download it again")
    if head[:2] == b"\x1f\x8b":
        raise UserError(f"shard {path} is gzip-compressed as a whole; gunzip it (samples inside may stay compressed)")
    if size % 512 or len(tail) < _END_MARKER_BYTES or any(tail):
        raise UserError(f"shard {path} is truncated ({size} bytes, no end-of-archive mark); write or download it again")


def index_shard(file: BinaryIO, data_key: str, name: str) -> ShardIndex:
    """Reads every header of the tar in `file` and returns where its samples lie.

    `name` is what messages call the shard. Raises `UserError` for a truncated or damaged tar, and
    for one without samples. Of several admitted suffixes the first that occurs in the shard is taken throughout.
    """
    admitted = sample_suffixes(data_key)
    extents: list[tuple[int, int]] = []
    suffix = ""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                match = _KEY_AND_SUFFIX.match(member.name)
                found = match.group(1).lower() if match and member.isreg() else ""
                if found not in admitted:
                    continue
                suffix = suffix or found
                if found == suffix:
                    extents.append((member.offset_data, member.size))
            end = tar.offset
        # tarfile stops in silence at a damaged header: what is left must be the archive's zero padding.
        file.seek(end)
        rest = file.read(_END_MARKER_BYTES)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(f"shard {name} is truncated or no tar ({error}); write or download it again") from error
    except OSError as error:
        raise UserError(f"shard {name} cannot be read: {error.strerror or error}") from error
    if len(rest) < _END_MARKER_BYTES or any(rest):
        raise UserError(f"shard {name} is cut off or damaged after sample {len(extents)}; write or download it again")
    if not extents:
        raise UserError(f"shard {name} holds no sample with suffix {' or '.join(admitted)}; check --data-key")
    return ShardIndex(np.array(extents, dtype=np.int64), suffix)


def decode_sample(data: bytes, suffix: str, where: str) -> np.ndarray:
    """Token ids (1-D int64) of one member's bytes. Raises `UserError` naming `where` if they are no list of ids.

    open_lm's own early shards hold the end token as a string; it reads as id 0 there and here.
    """
    try:
        text = gzip.decompress(data) if suffix.endswith(".gz") else data
        try:
            tokens = json.loads(text)
        except ValueError:
            tokens = ast.literal_eval(text.decode())
    except (ValueError, SyntaxError, OSError, EOFError, zlib.error, MemoryError, RecursionError) as error:
        raise UserError(f"{where} cannot be decoded as {suffix} ({error}); write the shard again") from error
    if not isinstance(tokens, list):
        raise UserError(f"{where} is a {type(tokens).__name__}, not a list of token ids; write the shard again")
    kinds = set(map(type, tokens))
    if str in kinds:
        tokens = [0 if token == END_OF_TEXT else token for token in tokens]
        kinds = set(map(type, tokens))
    if kinds - {int}:
        bad = next(token for token in tokens if type(token) is not int)
        raise UserError(f"{where} holds {bad!r}, which is no token id; write the shard again")
    try:
        return np.array(tokens, dtype=np.int64)
    except OverflowError as error:
        raise UserError(f"{where} holds a token id beyond 64 bits; write the shard again") from error
