"""`python -m openlm_moe.telemetry.watch DIR`: a run's state in a terminal, read from its metrics.jsonl alone.

For a login node: it needs no port and no service, only the run's folder.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.options import Parser
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.console import duration, short
from openlm_moe.telemetry.jsonl import FILE, read_records
from openlm_moe.telemetry.sinks import RUN_FILE

BARS = "▁▂▃▄▅▆▇█"
TREND = 40  # characters of a curve
RATE_OVER = 20  # records that the throughput for the ETA is averaged over


@dataclass(frozen=True)
class State:
    """A run as far as its folder tells. What was never logged is None; `valid` maps validation sets to perplexity."""

    name: str
    step: int
    tokens: int
    total_tokens: int | None
    age: float  # seconds since the last record
    loss: float | None
    perplexity: float | None
    valid: dict[str, float]
    tokens_per_second: float | None
    mfu: float | None
    eta: float | None  # seconds
    losses: list[float]
    loads: dict[int, list[float]]  # layer id -> share per expert
    dropped: float | None


def read_state(folder: Path) -> State:
    """The state of the run in `folder`. Raises `UserError` where there is no metrics.jsonl."""
    records = read_records(folder)
    document = _document(folder)
    latest: dict[str, Any] = {}
    for record in records:
        latest |= record
    rates = [r[metrics.TOKENS_PER_SECOND] for r in records if math.isfinite(r.get(metrics.TOKENS_PER_SECOND, math.nan))]
    rates = rates[-RATE_OVER:]
    rate = sum(rates) / len(rates) if rates else None
    tokens, total = int(latest.get(metrics.TOKENS, 0)), document.get("total_tokens")
    layers = (metrics.parse_layer_metric(name) for name in latest)
    valid = (metrics.parse_valid_metric(name) for name in latest)
    return State(
        name=document.get("name") or folder.resolve().name,
        step=int(latest.get(metrics.STEP, 0)),
        tokens=tokens,
        total_tokens=total,
        age=max(time.time() - (folder / FILE).stat().st_mtime, 0.0),
        loss=latest.get(metrics.LOSS),
        perplexity=latest.get(metrics.PERPLEXITY),
        valid={v[0]: latest[metrics.valid_metric(*v)] for v in valid if v and v[1] == "perplexity"},
        tokens_per_second=rate,
        mfu=latest.get(metrics.MFU),
        eta=(total - tokens) / rate if total and rate else None,
        losses=[r[metrics.LOSS] for r in records if metrics.LOSS in r],
        loads={p[0]: latest[metrics.layer_metric(*p)] for p in layers if p and p[1] == "load"},
        dropped=latest.get(metrics.DROPPED_FRACTION),
    )


def _document(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return {}


def bars(values: Sequence[float], low: float, high: float) -> str:
    """One character per value, its height between `low` and `high`."""
    shares = [min(max((v - low) / (high - low), 0), 1) if high > low else 0 for v in values]
    return "".join(BARS[round((len(BARS) - 1) * share)] for share in shares)


def curve(values: Sequence[float], width: int = TREND) -> str:
    """`values` as at most `width` bars: means over equal stretches; what is not finite is left out."""
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return bars(means, min(means), max(means))


def load_style(relative: float) -> str:
    """The colour of an expert with `relative` times the mean load."""
    if relative > 2:
        return "red"
    if relative > 1.5:
        return "yellow"
    return "blue" if relative < 0.5 else "green"


def render(state: State) -> Any:
    """The state as something that rich prints. Raises `UserError` when rich is missing."""
    try:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise UserError('watch needs: pip install "openlm-moe[watch]"') from None

    facts = Table.grid(padding=(0, 2))
    for label, value in fact_rows(state):
        facts.add_row(Text(label, style="dim"), Text(value))
    parts: list[Any] = [facts]
    if state.total_tokens:
        parts.append(ProgressBar(total=state.total_tokens, completed=state.tokens))
    if state.loads:
        table = Table(title="load per expert, last record", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for heading in ("layer", "max/mean", "min/mean", "experts 0, 1, ... (full bar: twice the mean)"):
            table.add_column(heading, justify="left" if heading.startswith("experts") else "right")
        for layer, shares in sorted(state.loads.items()):
            relative = [share * len(shares) for share in shares]
            cells = Text.assemble(*((bars([r], 0, 2), load_style(r)) for r in relative))
            table.add_row(str(layer), f"{max(relative):.2f}", f"{min(relative):.2f}", cells)
        parts += [Text(), table]
    return Panel(Group(*parts), title=state.name, title_align="left")


def fact_rows(state: State) -> list[tuple[str, str]]:
    """(label, value) of what is known."""
    of = f" of {short(state.total_tokens)} ({state.tokens / state.total_tokens:.1%})" if state.total_tokens else ""
    rows = [("step", f"{state.step:,}"), ("tokens", short(state.tokens) + of)]
    if state.loss is not None:
        rows += [("loss", f"{state.loss:.4f}"), ("", curve(state.losses))]
    if state.perplexity is not None:
        rows.append(("perplexity", f"{state.perplexity:.2f}"))
    rows += [(f"perplexity, {name}", f"{value:.2f}") for name, value in state.valid.items()]
    if state.tokens_per_second is not None:
        mfu = "" if state.mfu is None else f"  ({state.mfu:.1%} MFU)"
        rows.append(("tokens/s", short(state.tokens_per_second) + mfu))
    if state.dropped:
        rows.append(("dropped slots", f"{state.dropped:.1%}"))
    if state.eta is not None:
        rows.append(("ETA", "done" if state.eta <= 0 else duration(state.eta)))
    rows.append(("last record", f"{duration(state.age)} ago"))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows the run until Ctrl-C, or once; returns the exit code: 0, or 2 with one line on stderr."""
    parser = Parser("python -m openlm_moe.telemetry.watch", description="A run's state in a terminal.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of a run, which holds its metrics.jsonl")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)")
    parser.add_argument("--once", action="store_true", help="print the state once and end; so also without a terminal")
    args = parser.parse_args(arguments)
    try:
        first = render(read_state(args.folder))
        if args.once or not sys.stdout.isatty():
            _print(first)
        else:
            _follow(args.folder, args.interval)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _print(what: Any) -> None:
    from rich.console import Console

    Console().print(what)


def _follow(folder: Path, interval: float) -> None:
    from rich.live import Live

    with Live(render(read_state(folder)), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(render(read_state(folder)), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
