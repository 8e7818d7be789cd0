"""Reads documents out of input files: text, JSON lines (plain, gzip, zstd) and parquet, local or through fsspec."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from openlm_moe.data.remote import file_system, is_remote, local_part
from openlm_moe.errors import UserError

FORMATS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSIONS = (".gz", ".zst", ".zstd")


def find_inputs(patterns: Sequence[str], format: str = "auto") -> list[tuple[str, int]]:
    """(path or URL, size in bytes) of every input file, sorted, each once.

    A folder stands for the files below it that have a known ending (all of them where `format` is given); `*`, `?` and
    `[]` are expanded. Raises `UserError` for a pattern that matches nothing.
    """
    found: dict[str, int] = {}
    for pattern in patterns:
        fs, path = file_system(pattern)
        protocol = pattern.partition("://")[0] + "://" if is_remote(pattern) else ""
        if any(character in path for character in "*?["):
            names = fs.glob(path, detail=True)
        elif fs.isdir(path):
            names = {name: info for name, info in fs.find(path, detail=True).items() if not _hidden(name, path)}
            if format == "auto":
                names = {name: info for name, info in names.items() if format_of(name) is not None}
        else:
            names = {path: fs.info(path)} if fs.exists(path) else {}
        files = {name: info for name, info in names.items() if info["type"] == "file"}
        if not files:
            raise UserError(
                f"no input file matches {pattern}; known endings are {', '.join(FORMATS)} (with .gz or .zst)"
            )
        for name, info in files.items():
            url = name if not protocol or "://" in name else f"{protocol}{name.lstrip('/')}"
            if format == "auto" and format_of(url) is None:
                raise UserError(f"{url} has no known ending; name the format by --format text, jsonl or parquet")
            found[url] = int(info["size"] or 0)
    return sorted(found.items())


def format_of(path: str) -> str | None:
    """The format that a file's ending tells, or None."""
    for ending in _COMPRESSIONS:
        path = path.removesuffix(ending)
    return FORMATS.get(Path(path).suffix.lower())


def read_documents(url: str, format: str = "auto", text_key: str = "text") -> Iterator[str]:
    """The documents of one file in order: a text file is one, a JSON line or parquet row has it under `text_key`.

    Raises `UserError` naming file and place where the content is not what the format says.
    """
    kind = format_of(url) if format == "auto" else format
    try:
        with _opened(url) as file:
            if kind == "parquet":
                yield from _parquet(file, url, text_key)
            elif kind == "jsonl":
                yield from _json_lines(file, url, text_key)
            else:
                yield file.read().decode()
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{url} is not UTF-8 text (byte {error.start}); convert it first") from error
    except Exception as error:  # readers and remote file systems each have their own exceptions
        raise UserError(f"{url} cannot be read: {' '.join(str(error).split()) or type(error).__name__}") from error


def _hidden(name: str, folder: str) -> bool:
    return any(part.startswith(".") for part in name[len(folder) :].split("/") if part)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[BinaryIO]:
    with contextlib.ExitStack() as stack:
        file: Any
        if is_remote(url):
            fs, path = file_system(url)
            file = stack.enter_context(fs.open(path, "rb"))
        else:
            file = stack.enter_context(open(local_part(url), "rb"))
        if url.endswith(".gz"):
            file = stack.enter_context(gzip.open(file, "rb"))
        elif url.endswith((".zst", ".zstd")):
            try:
                import zstandard
            except ImportError as error:
                raise UserError(f'{url} needs zstandard: pip install "openlm-moe[data]"') from error
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            file = stack.enter_context(io.BufferedReader(reader))
        yield file


def _json_lines(file: BinaryIO, url: str, text_key: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{url} line {number} is not JSON ({error})") from error
        text = entry.get(text_key) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{url} line {number} has no text under {text_key!r}; name the key by --text-key")
        yield text


def _parquet(file: BinaryIO, url: str, text_key: str) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f'{url} needs pyarrow: pip install "openlm-moe[data]"') from error
    table = parquet.ParquetFile(file)
    if text_key not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise UserError(f"{url} has no column {text_key!r} (it has {names}); name the column by --text-key")
    row = 0
    for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise UserError(f"{url} row {row} has no text in column {text_key!r}")
            yield text
            row += 1
