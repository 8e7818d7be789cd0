"""The table of runs: what each was, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.console import duration, short
from openlm_moe.telemetry.report.runs import Run

NOTHING = "–"


def _shown(value: float | None, form: Callable[[float], str] = short) -> str:
    return NOTHING if value is None else form(value)


def _moe(run: Run) -> str:
    moe = run.config.get("moe") or {}
    experts = moe.get("num_experts")
    if experts is None:
        return NOTHING
    if experts == 0:
        return "dense"
    kind = "" if moe.get("moe_type") == "dropless" else f", capacity {moe.get('capacity_factor')}"
    return f"{experts} experts, top-{moe.get('top_k')}{kind}"


def _parameters(run: Run) -> str:
    counts = run.config.get("parameters") or {}
    if "total" not in counts:
        return NOTHING
    return f"{short(counts['total'])} / {short(counts['active'])}"


def _valid(run: Run) -> str:
    best = run.best_valid_perplexity()
    return NOTHING if best is None else f"{best[1]:.2f}"


def _valid_set(run: Run) -> str:
    best = run.best_valid_perplexity()
    return NOTHING if best is None else best[0]


def _devices(run: Run) -> str:
    size, device = run.config.get("world_size"), run.config.get("device")
    return NOTHING if size is None else f"{size} × {device}" if device else str(size)


def _worst_load(run: Run) -> str:
    violation = run.last(metrics.MAX_VIOLATION)
    return NOTHING if violation is None else f"{violation + 1:.2f}"


def _dropped(run: Run) -> str:
    return _shown(run.last(metrics.DROPPED_FRACTION), lambda x: f"{x:.1%}")


def _commit(run: Run) -> str:
    commit = run.config.get("commit")
    if not commit:
        return NOTHING
    revision, _, dirty = str(commit).partition("-")
    return revision[:9] + (" + changes" if dirty else "")


COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("best valid. perplexity", _valid),
    ("on", _valid_set),
    ("train perplexity", lambda r: _shown(r.last(metrics.PERPLEXITY), lambda x: f"{x:.2f}")),
    ("tokens", lambda r: _shown(r.last(metrics.TOKENS))),
    ("steps", lambda r: _shown(r.last(metrics.STEP), lambda x: f"{x:,.0f}")),
    ("wall time", lambda r: _shown(r.last(metrics.WALL_TIME), duration)),
    ("active FLOPs", lambda r: _shown(r.last(metrics.ACTIVE_FLOPS), lambda x: f"{x:.2e}")),
    ("tokens/s", lambda r: _shown(r.typical(metrics.TOKENS_PER_SECOND))),
    ("tokens/s per device", lambda r: _shown(r.typical(metrics.TOKENS_PER_SECOND_PER_GPU))),
    ("MFU", lambda r: _shown(r.typical(metrics.MFU), lambda x: f"{x:.1%}")),
    ("max/mean load", _worst_load),
    ("dropped", _dropped),
    ("model", lambda r: str(r.config.get("model") or NOTHING)),
    ("MoE", _moe),
    ("parameters, of them active", _parameters),
    ("devices", _devices),
    ("commit", _commit),
)


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """(column titles, one row of text per run). A column in which no run has anything is left out."""
    rows: list[list[Any]] = [[form(run) for _, form in COLUMNS] for run in runs]
    filled = [i for i in range(len(COLUMNS)) if any(row[i] != NOTHING for row in rows)]
    titles = ["run", *(COLUMNS[i][0] for i in filled)]
    return titles, [[run.name, *(row[i] for i in filled)] for run, row in zip(runs, rows, strict=True)]
