"""Records: JSON lines, one object a line, appended whole. What every record says of where it was made."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from openlm_moe.errors import UserError
from openlm_moe.telemetry.environment import environment

RESULTS = Path(__file__).parent


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file, oldest first; none if there is no file. Raises `UserError` for a line that is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where} is no record (a JSON object): {line[:60]!r}; remove the line and measure it again")
    return record


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds one line; several processes may do so at once. A line that a killed process left half is ended first."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            whole = file.read() == b"\n"
        else:
            whole = True
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def origin() -> dict[str, Any]:
    """{"machine": ..., "versions": ..., "commit": ...} of this process."""
    return {"machine": machine(), **environment()}


def machine() -> dict[str, Any]:
    """The processor, how many of its cores there are, and how many threads torch uses; the GPU if there is one."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()
