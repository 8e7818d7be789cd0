"""The layer benchmark: time of a MoE feed-forward over the dense one's of the same FLOPs, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from results import records
from results.records import RESULTS
from results.tables.markdown import NOT_RUN, table

OURS = "openlm_moe"


def newest(path: Path = RESULTS / "layer" / "record.jsonl") -> list[dict[str, Any]]:
    """The last record of each layer, dtype, routing, device and allocator."""
    names = ("name", "dtype", "routing", "device", "malloc")
    return list({tuple(r[n] for n in names): r for r in records.read(path)}.values())


def make() -> str:
    found = newest()
    if not found:
        return f"Layer benchmark: {NOT_RUN}."
    contenders = list(dict.fromkeys(name for r in found for name in r["results"] if name != "dense"))
    rows = []
    for r in found:
        s = r["shape"]
        what = f"{r['name']}: d {s['dim']}, hidden {s['hidden']}, E {s['experts']}, T {s['tokens']}"
        best = fastest(r)
        cells = []
        for c in contenders:
            cell = f"{r['results'][c]['ratio']:.2f}" if c in r["results"] else NOT_RUN
            cells.append(f"**{cell}**" if c == best else cell)
        saved = f"{r['results'][OURS]['saved_bytes'] / 2**20:.0f} / {_least_of_others(r):.0f}"
        rows.append([what, r["dtype"], r["routing"], r["malloc"], *cells, saved])
    header = ["layer", "dtype", "routing", "malloc", *contenders, "MiB kept for backward: ours / least of the others"]
    return table(header, rows)


def fastest(record: dict[str, Any]) -> str:
    """The MoE layer that took least time."""
    return min((c for c in record["results"] if c != "dense"), key=lambda c: record["results"][c]["ratio"])


def _least_of_others(record: dict[str, Any]) -> float:
    return min(r["saved_bytes"] for name, r in record["results"].items() if name not in (OURS, "dense")) / 2**20
