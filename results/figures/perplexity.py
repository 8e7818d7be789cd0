"""Perplexity over active training FLOPs: the sweep's ladder, and the published table beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.count import flops_per_token
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan import published
from results.figures.drawing import COLOURS, empty, panels, save
from results.tables.runs import Sweep

NAME = "perplexity_over_flops.png"
PUBLISHED_TOKENS = 20e9


def draw(out: Path) -> None:
    figure, (here, told) = panels(2)
    _here(here, Sweep())
    _published(told)
    save(figure, out / NAME)


def _here(axes: Any, sweep: Sweep) -> None:
    names = list(dict.fromkeys(name for size in sweep.sizes() for name in sweep.ladder_arms(size)))
    drawn = 0
    for name, colour in zip(names, COLOURS, strict=False):
        arms = [(size, sweep.arm(size, name)) for size in sweep.sizes() if name in sweep.ladder_arms(size)]
        points = [
            (arm.any_run["flops_per_token"] * arm.any_run["tokens"], arm.perplexities)
            for _, arm in arms
            if arm.any_run is not None
        ]
        if points:
            x, y = [p[0] for p in points], [sum(p[1]) / len(p[1]) for p in points]
            low, high = ([abs(f(p[1]) - mean) for p, mean in zip(points, y, strict=True)] for f in (min, max))
            what = sweep.queue["arms"][name]["what"]
            axes.errorbar(x, y, (low, high), fmt="o-", ms=5, capsize=3, lw=1.2, color=colour, label=what)
            drawn += 1
    if not drawn:
        return empty(axes, "sweep")
    axes.set(title="here (mean and range over seeds)", xlabel="active training FLOPs", ylabel="validation perplexity")
    axes.set_xscale("log" if len(axes.lines) and _spread(axes) else "linear")
    axes.legend(fontsize="x-small", frameon=False)


def _spread(axes: Any) -> bool:
    low, high = axes.get_xlim()
    return low > 0 and high / low > 3


def _published(axes: Any) -> None:
    for experts, colour in (("1", COLOURS[0]), ("8", COLOURS[1]), ("32", COLOURS[2])):
        points = []
        for model, told in published.MODELS.items():
            if experts in told["perplexity"]:
                config = MoEConfig(num_experts=0 if experts == "1" else int(experts))
                flops = flops_per_token(load_model_params(model), config) * PUBLISHED_TOKENS
                points.append((flops, told["perplexity"][experts]))
        label = "dense" if experts == "1" else f"capacity MoE, {experts} experts"
        axes.plot(*zip(*points, strict=True), "o-", ms=5, lw=1.2, color=colour, label=label)
    axes.set(title="published (open_lm, A100, 20B tokens)", xlabel="active training FLOPs", ylabel="perplexity")
    axes.set_xscale("log")
    axes.legend(fontsize="x-small", frameon=False)
