"""Interleaved timing in a process of its own, and tables of the results."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from openlm_moe.errors import UserError

# glibc gives large blocks back to the system at once, so that every buffer's pages are made anew. With these it keeps
# them, as a long-running process with a caching allocator would, and the arithmetic is what is compared.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every function in every round, one after the other within a round, after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: Mapping[str, list[float]], floor: str) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the median over rounds of the ratio to the floor in the same round."""
    return {
        name: {
            "ms": 1e3 * statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, seconds[floor], strict=True)),
        }
        for name, values in seconds.items()
    }


def in_own_process(module: str, request: dict[str, Any], tuned_malloc: bool) -> Any:
    """`module.measure(**request)` in a new process: its allocator, its memory, its threads."""
    environment = {name: value for name, value in os.environ.items() if name not in TUNED_MALLOC}
    if tuned_malloc:
        environment |= TUNED_MALLOC
    command = [sys.executable, "-m", "openlm_moe.bench.measure", module, json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise UserError(f"the measuring process ended with exit code {done.returncode}; its message is above")
    return json.loads(done.stdout.splitlines()[-1])


def machine(device: str) -> str:
    """What was measured on, in a line."""
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{what}; torch {torch.__version__}"


def write_json(path: str | None, record: Any) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(json.dumps(importlib.import_module(sys.argv[1]).measure(**json.loads(sys.argv[2]))))
