"""Runs as the report sees them: metrics.jsonl and run.json of a folder, read once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.jsonl import read_records
from openlm_moe.telemetry.sinks import RUN_FILE

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """One run: `name` is unique within a report, `records` has one entry per step."""

    name: str
    folder: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]

    def points(self, y: str, x: str = metrics.TOKENS) -> Points:
        """(x, y) wherever a record holds both as finite numbers."""
        pairs = ((r.get(x), r.get(y)) for r in self.records)
        return [(a, b) for a, b in pairs if _finite(a) and _finite(b)]

    def valid_sets(self) -> list[str]:
        """Names of the validation sets, in order of first appearance."""
        names = (metrics.parse_valid_metric(name) for r in self.records for name in r)
        return list(dict.fromkeys(n[0] for n in names if n))

    def layer_ids(self) -> list[int]:
        """Ids of the MoE layers whose load was logged."""
        parsed = (metrics.parse_layer_metric(name) for r in self.records for name in r)
        return sorted({p[0] for p in parsed if p and p[1] == "load"})

    def loads(self, layer_id: int) -> list[tuple[float, list[float]]]:
        """(tokens, share per expert) of one layer over training."""
        name = metrics.layer_metric(layer_id, "load")
        return [(r[metrics.TOKENS], r[name]) for r in self.records if name in r]

    def last(self, name: str) -> float | None:
        """The last finite value of a metric."""
        return next((r[name] for r in reversed(self.records) if _finite(r.get(name))), None)

    def typical(self, name: str) -> float | None:
        """The median of a metric over the run."""
        values = [r[name] for r in self.records if _finite(r.get(name))]
        return median(values) if values else None

    def best_valid_perplexity(self) -> tuple[str, float, float] | None:
        """(validation set, perplexity, tokens) at the lowest perplexity of the first validation set."""
        for name in self.valid_sets():
            points = self.points(metrics.valid_metric(name, "perplexity"))
            if points:
                tokens, value = min(points, key=lambda p: p[1])
                return name, value, tokens
        return None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Reads each run folder. Raises `UserError` for one without metrics, or with nothing logged yet."""
    paths = [Path(folder) for folder in folders]
    documents = [_run_document(path) for path in paths]
    names = [str(document.get("name") or path.resolve().name) for path, document in zip(paths, documents, strict=True)]
    runs = []
    for path, document, name in zip(paths, documents, names, strict=True):
        records = read_records(path)
        if not records:
            raise UserError(f"{path} has an empty metrics.jsonl; report on it when it has logged a step")
        if names.count(name) > 1:
            name = os.path.relpath(path)
        runs.append(Run(name, path, records, document.get("config") or {}))
    return runs


def _run_document(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(f"{folder / RUN_FILE} is not JSON; remove it to report on the metrics alone") from None
