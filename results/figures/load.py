"""Expert load over training: rows of the busiest expert over the mean, of the worst layer, for ways of balancing."""

from __future__ import annotations

from pathlib import Path

from results.figures.drawing import COLOURS, empty, panels, save
from results.tables.questions import SIZE
from results.tables.runs import Sweep, load_curve

NAME = "expert_load.png"
ARMS = ("dmoe-8", "balance-0.01", "bias-balance", "no-balance", "dmoe-8-norm", "dmoe-32")
TICKS = (1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32)


def draw(out: Path) -> None:
    figure, (axes,) = panels(1)
    sweep, drawn = Sweep(), 0
    for name, colour in zip(ARMS, COLOURS, strict=False):
        arm = sweep.arm(SIZE, name)
        if arm.any_run is not None:
            axes.plot(*zip(*load_curve(arm.any_run), strict=True), color=colour, lw=1.4, label=arm.what)
            drawn += 1
    if drawn:
        axes.set(title="load of the busiest expert over the mean", xlabel="tokens", ylabel="max / mean", yscale="log")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in TICKS if low <= tick <= high], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M")
        axes.legend(fontsize="small", frameon=False)
    else:
        empty(axes, "sweep")
    save(figure, out / NAME)
