"""Reads wandb's transaction log (run-*.wandb): wandb's protobuf records in LevelDB's log format, after a header."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def _payloads(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", "not a wandb transaction log"
    position, parts = 7, []
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        parts.append(data[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """(kind, protobuf message) of every record."""
    from wandb.proto import wandb_internal_pb2

    for payload in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        yield kind, getattr(record, kind)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class RunFile:
    """What one offline folder holds: `.run`, `.config`, `.history` (rows), `.metrics` (definitions), `.exit_code`."""

    def __init__(self, folder: Path) -> None:
        (self.path,) = folder.glob("run-*.wandb")
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.metrics: list[Any] = []
        self.exit_code: int | None = None
        for kind, message in records(self.path):
            if kind == "run":
                self.run = message
                self.config |= _values(message.config.update)
            elif kind == "config":
                self.config |= _values(message.update)
            elif kind == "history":
                self.history.append(_values(message.item))
            elif kind == "metric":
                self.metrics.append(message)
            elif kind == "exit":
                self.exit_code = message.exit_code


def offline_runs(folder: Path) -> list[RunFile]:
    """The offline runs under `folder`/wandb, in order of start."""
    return [RunFile(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]
