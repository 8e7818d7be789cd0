"""metrics.jsonl: one JSON object per log call, written as it happens, one history after any number of restarts."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from openlm_moe.errors import UserError
from openlm_moe.telemetry.metrics import STEP, WALL_TIME

FILE = "metrics.jsonl"
SUPERSEDED_FILE = "metrics.superseded.jsonl"
WAIT = 10.0  # seconds: the data workers of a process that was killed hold its lock a little longer


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity; both become null, and `read_records` gives NaN back."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every whole record of `path`, as bytes and parsed; the half line that a killed process leaves is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and line.endswith(b"\n"):
                yield line, record


def _lock(file: BinaryIO, folder: Path) -> None:
    """Takes the file's lock until it is closed; on a file system without locks, does nothing."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.close()
            raise UserError(
                f"another process is writing to {folder}; let that run end, or choose another --name"
            ) from None
        except OSError:
            return


class JsonlSink:
    """Appends records to `folder`/metrics.jsonl and flushes each.

    Records later than `resume_step` come from a run that went on after the checkpoint that is now resumed. They move to
    metrics.superseded.jsonl, so that any reader of metrics.jsonl meets each step once and nothing is lost.

    The file stays locked while the sink is open: a second start of a run that is alive is refused by `UserError`.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        path = folder / FILE
        try:
            before = path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another folder for the run") from None
        _lock(before, folder)
        kept, superseded = [], []
        for line, record in _lines(path):
            (kept if record.get(STEP, 0) <= resume_step else superseded).append((line, record))
        self.last: dict[str, Any] = kept[-1][1] if kept else {}
        try:
            if superseded:
                with (folder / SUPERSEDED_FILE).open("ab") as file:
                    file.writelines(line for line, _ in superseded)
            aside = path.with_suffix(".tmp")
            self._file = aside.open("wb")
            _lock(self._file, folder)  # before it takes the other's place: at no time is there one to be had
            self._file.writelines(line for line, _ in kept)
            self._file.flush()
            os.replace(aside, path)
            before.close()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another folder for the run") from None
        self.rows_ever = len(kept) + sum(1 for _ in _lines(folder / SUPERSEDED_FILE))

    def log(self, record: dict[str, Any]) -> None:
        line = json.dumps({name: _plain(value) for name, value in record.items()}, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self.rows_ever += 1

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The history of the run in `folder`: one record per step in order, several of one step merged; null is NaN.

    A step's time is its first record's: an evaluation that follows it takes time of its own.
    Raises `UserError` if there is no metrics.jsonl.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise UserError(f"{folder} has no {FILE}; name the folder of a run")
    steps: dict[int, dict[str, Any]] = {}
    for _, record in _lines(path):
        values = {name: math.nan if value is None else value for name, value in record.items()}
        known = steps.setdefault(record.get(STEP, 0), {})
        known.update({name: value for name, value in values.items() if name != WALL_TIME or name not in known})
    return [steps[step] for step in sorted(steps)]
