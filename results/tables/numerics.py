"""Relative errors of the kernels against float64."""

from __future__ import annotations

from pathlib import Path

from results import records
from results.records import RESULTS
from results.tables.markdown import NOT_RUN, table

RECORDS = RESULTS / "numerics" / "record.jsonl"
DTYPES = ("fp32", "bf16", "fp16")


def make(path: Path = RECORDS) -> str:
    """The newest record of each backend, kernel and shape, a column for each dtype."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for r in records.read(path):
        row = cells.setdefault((r["shape"], r["kernel"], f"{r['backend']}, {r['device']}"), {})
        row[r["dtype"]] = f"{r['error']:.1e} ({r['worst_row']:.1e})"
    if not cells:
        return f"Numerics: {NOT_RUN}."
    header = ["shape", "kernel", "backend", *(f"{d}: whole (worst row)" for d in DTYPES)]
    return table(header, [[*key, *(row.get(d, NOT_RUN) for d in DTYPES)] for key, row in sorted(cells.items())])
