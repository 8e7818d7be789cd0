"""dMoE against capacity MoE: validation perplexity over the dense model's, and training loss apart on the same data."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from results.figures.drawing import COLOURS, empty, panels, save
from results.tables.questions import SIZE
from results.tables.runs import Sweep, ratios

NAME = "dmoe_against_capacity.png"
ARMS = ("dense-2x", "dmoe-8-norm", "dmoe-8", "capacity-8", "dmoe-32", "capacity-32")
PAIRS = (("capacity-8", "dmoe-8"), ("capacity-32", "dmoe-32"))


def draw(out: Path) -> None:
    figure, (left, right) = panels(2)
    sweep = Sweep()
    _perplexity(left, sweep)
    _training(right, sweep)
    save(figure, out / NAME)


def _perplexity(axes: Any, sweep: Sweep) -> None:
    dense, names = sweep.arm(SIZE, "dense"), []
    for name in ARMS:
        arm = sweep.arm(SIZE, name)
        if found := ratios(arm, dense):
            colour = COLOURS[{"dmoe": 0, "capacity": 1}.get(name.partition("-")[0], 7)]
            mean, at = sum(found) / len(found), len(names)
            error = [[mean - min(found)], [max(found) - mean]]
            axes.errorbar([at], [mean], error, fmt="o", ms=7, capsize=4, color=colour)
            text = f"{mean:.3f}" + (f"\n{arm.dropped:.1%} dropped" if name.startswith("capacity") else "")
            axes.annotate(text, (at, mean), xytext=(8, 0), textcoords="offset points", va="center", fontsize="x-small")
            names.append(name)
    if not names:
        return empty(axes, "validation")
    axes.axhline(1, color="#222222", lw=0.8)
    axes.set_xlim(-0.5, len(names))
    axes.margins(y=0.15)
    axes.set_xticks(range(len(names)), names, fontsize="x-small")
    axes.set(title=f"{SIZE}: validation perplexity / dense", ylabel="ratio")


def _training(axes: Any, sweep: Sweep) -> None:
    """Capacity's training loss less dMoE's at the same step, the same tokens: the mean so far, over common seeds."""
    drawn = 0
    for (capacity, dmoe), colour in zip(PAIRS, (COLOURS[1], COLOURS[3]), strict=True):
        a, b = sweep.arm(SIZE, capacity), sweep.arm(SIZE, dmoe)
        for seed in sorted(a.runs.keys() & b.runs.keys()):
            both = list(zip(a.runs[seed]["train_loss"], b.runs[seed]["train_loss"], strict=True))
            apart = [x[1] - y[1] for x, y in both]
            means = [total / (i + 1) for i, total in enumerate(itertools.accumulate(apart))]
            label = f"{capacity} less {dmoe}" if seed == min(a.runs.keys() & b.runs.keys()) else None
            axes.plot([x[0] for x, _ in both], means, color=colour, lw=1.4, label=label)
            drawn += 1
    if not drawn:
        return empty(axes, "training, capacity less dMoE")
    axes.axhline(0, color="#222222", lw=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M")
    axes.set(title="training loss, mean of the logged steps so far", xlabel="tokens", ylabel="nats a token")
    axes.legend(fontsize="small", frameon=False)
