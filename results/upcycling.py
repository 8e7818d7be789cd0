"""The start of an upcycled run: a dense model trained here, converted by the plugin's own commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openlm_moe.convert.__main__ import main as convert
from openlm_moe.parallel.checkpoint import complete_checkpoints
from results.sweep_queue import Run


def upcycled(dense: Run, queue: dict[str, Any], work: Path, train_run: Callable[..., Any]) -> Path:
    """The checkpoint whose experts are copies of `dense`'s feed-forwards; trains `dense` once more to have it."""
    source = work / f"upcycling_{dense.name}"
    made = source / "experts"
    if not complete_checkpoints(made):
        if train_run(dense, queue, source) is None:
            raise SystemExit("stopped; the next start goes on from here")
        checkpoint = complete_checkpoints(source / dense.name / "run" / "checkpoints")[-1]
        shutil.rmtree(source / "pt", ignore_errors=True)
        _convert("dcp-to-pt", checkpoint, source / "pt", "--no-optimizer")
        weights = next((source / "pt").glob("epoch_*.pt"))
        _convert("upcycle", weights, source / "pt" / "upcycled.pt", "--experts", 8, "--moe-every", 2)
        _convert("pt-to-dcp", source / "pt" / "upcycled.pt", made)
    return complete_checkpoints(made)[-1]


def _convert(*words: object) -> None:
    if code := convert([str(word) for word in words]):
        raise SystemExit(code)
