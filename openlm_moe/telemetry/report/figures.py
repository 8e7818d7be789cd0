"""The same charts as PNG files, for papers, issues and slides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.telemetry.console import short
from openlm_moe.telemetry.report.charts import Chart, HeatMap, charts, entropy_chart, heat_maps
from openlm_moe.telemetry.report.runs import Run

RUN_COLOURS = ("#1f6fd6", "#d9480f", "#0b8457", "#9333b8", "#b07900", "#c2255c", "#0b7c93", "#5f6773")
COLD, EVEN, HOT = "#1f6fd6", "#f3f4f6", "#d9480f"


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError('the PNGs need: pip install "openlm-moe[report]"; --no-png writes the page alone') from None
    matplotlib.use("agg")
    return matplotlib


def write_pngs(runs: Sequence[Run], out: Path) -> list[Path]:
    """One PNG per chart that has something to show, and per run one of its layers' load. Returns their paths."""
    _matplotlib()
    written = [_line_png(chart, out) for chart in charts(runs) if chart.series and not chart.always_zero]
    for i, run in enumerate(runs):
        if run.layer_ids():
            slug = re.sub(r"[^\w.-]+", "_", run.name)
            written.append(_line_png(entropy_chart(runs, i), out, f"routing_entropy_{slug}"))
            written.append(_heat_png(heat_maps(runs, i), run.name, out / f"expert_load_{slug}.png"))
    return written


def _line_png(chart: Chart, out: Path, name: str | None = None) -> Path:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for series in chart.series:
        shaded = series.shade is not None
        colour = plt.get_cmap("viridis")(0.9 * series.shade) if shaded else RUN_COLOURS[series.run % len(RUN_COLOURS)]
        marker = "o" if len(series.points) <= 40 else None
        axes.plot(*zip(*series.points, strict=True), "--" if series.dashed else "-", color=colour, label=series.label,
                  linewidth=1.6, marker=marker, markersize=3.5)  # fmt: skip
        if series.band:
            axes.fill_between(*zip(*series.band, strict=True), color=colour, alpha=0.15, linewidth=0)
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.y_top is not None:
        axes.set_ylim(top=chart.y_top * 1.05)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(color="#e9ecf0", which="both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False, ncols=2 if len(chart.series) > 6 else 1)
    return _save(figure, out / f"{name or chart.id}.png")


def _heat_png(maps: Sequence[HeatMap], title: str, path: Path) -> Path:
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("load", [COLD, EVEN, HOT])
    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4 * columns + 1, 2.6 * rows + 0.6), squeeze=False,
                                layout="constrained")  # fmt: skip
    image = None
    for axes, item in zip(grid.flat, maps, strict=False):
        load = np.log2(np.maximum(np.array(item.load).T, 1e-6))
        edges = [0.0, *item.tokens]
        image = axes.pcolormesh(edges, np.arange(len(load) + 1) - 0.5, load, cmap=colours, vmin=-2, vmax=2)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.set(title=item.title, xlabel="training tokens", ylabel="expert")
    for axes in list(grid.flat)[len(maps) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=grid, label="load / mean", ticks=[-2, -1, 0, 1, 2])
    bar.set_ticklabels(["≤ ¼", "½", "1", "2", "≥ 4"])
    figure.suptitle(f"Load per expert, {title}")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
