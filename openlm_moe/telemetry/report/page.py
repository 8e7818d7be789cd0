"""The HTML page: everything inside one file, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from openlm_moe.telemetry.console import short
from openlm_moe.telemetry.report.charts import Chart, charts, entropy_chart, heat_maps, plain
from openlm_moe.telemetry.report.runs import Run
from openlm_moe.telemetry.report.table import table

MAIN = ("perplexity_tokens",)  # the charts that get the full width
SECTIONS = (
    ("Perplexity", ("perplexity_tokens", "perplexity_wall_time", "perplexity_active_flops")),
    ("Losses", ("loss", "balance", "z_loss")),
    ("Speed", ("throughput", "mfu", "memory")),
    ("Optimisation", ("grad_norm", "lr")),
)
EXPERTS = ("violation", "dropped")


def html_page(runs: Sequence[Run], title: str) -> str:
    """The report on `runs` as one HTML document."""
    by_id = {chart.id: chart for chart in charts(runs)}
    drawn: list[dict] = []
    body = [f"<header><h1>{escape(title)}</h1>{_headline(runs)}</header>", _table(runs)]
    for heading, ids in SECTIONS:
        body.append(_section(heading, [by_id[i] for i in ids]))
        drawn += [plain(by_id[i]) for i in ids]
    experts, expert_items = _experts(runs, [by_id[i] for i in EXPERTS])
    body.append(experts)
    data = {"runs": [run.name for run in runs], "charts": drawn + [plain(item) for item in expert_items]}
    # A "<" inside the JSON could end the script element.
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _file("page.html").format(
        title=escape(title), style=_file("style.css"), body="\n".join(body), data=payload, script=_file("charts.js")
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _headline(runs: Sequence[Run]) -> str:
    found = [(best, run.name) for run in runs if (best := run.best_valid_perplexity())]
    if not found:
        return f"<p>{len(runs)} run{'s' if len(runs) > 1 else ''}, no validation yet.</p>"
    (name, value, tokens), run = min(found, key=lambda pair: pair[0][1])
    return (
        f"<p>Lowest validation perplexity: <strong>{value:.2f}</strong> on {escape(name)}, "
        f"by <strong>{escape(run)}</strong> after {short(tokens)} tokens.</p>"
    )


def _table(runs: Sequence[Run]) -> str:
    titles, rows = table(runs)
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = []
    for i, row in enumerate(rows):
        name = f'<th scope="row"><i class="key c{i % 8}"></i>{escape(row[0])}</th>'
        body.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>")
    return (
        '<section id="runs"><h2>Runs</h2><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _figure(chart: Chart) -> str:
    wide = " wide" if chart.id in MAIN else ""
    return f'<figure class="chart{wide}" id="{chart.id}"><h3>{escape(chart.title)}</h3></figure>'


def _section(heading: str, items: Sequence[Chart]) -> str:
    return f'<section id="{heading.lower()}"><h2>{heading}</h2>{_grid(items)}</section>'


def _grid(items: Sequence[Chart]) -> str:
    """The charts' figures, wide ones first, and a line that names those with nothing to see."""
    shown = [chart for chart in items if chart.series and not chart.always_zero]
    wide = "".join(_figure(chart) for chart in shown if chart.id in MAIN)
    others = "".join(_figure(chart) for chart in shown if chart.id not in MAIN)
    missing = ", ".join(chart.title for chart in items if not chart.series)
    zero = ", ".join(chart.title for chart in items if chart.always_zero)
    notes = [f"Not logged by any run: {missing}."] * bool(missing) + [f"0 throughout: {zero}."] * bool(zero)
    note = f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
    return wide + (f'<div class="grid">{others}</div>' if others else "") + note


def _experts(runs: Sequence[Run], overall: Sequence[Chart]) -> tuple[str, list]:
    """The section on expert load, and what its figures draw."""
    items: list = list(overall)
    parts = [_grid(overall)]
    shown = [i for i, run in enumerate(runs) if run.layer_ids()]
    for i in shown:
        entropy, maps = entropy_chart(runs, i), heat_maps(runs, i)
        items += [entropy, *maps]
        figures = "".join(f'<figure class="heat" id="{m.id}"><h3>{m.title}</h3></figure>' for m in maps)
        opened = " open" if i == shown[0] else ""
        parts.append(
            f'<details class="run"{opened}><summary><i class="key c{i % 8}"></i>{escape(runs[i].name)}</summary>'
            f'<div class="grid">{_figure(entropy)}</div><h3>Load per expert over training</h3>'
            f'<div class="scale"></div><div class="grid heats">{figures}</div></details>'
        )
    return f'<section id="experts"><h2>Expert load</h2>{"".join(parts)}</section>', items
