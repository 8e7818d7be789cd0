"""What the report draws, as data: the page's script and the PNGs both draw from these charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.report.runs import Points, Run

MAX_POINTS = 120  # of a line; more are averaged in equal stretches, with their range as a band around the line
MAX_COLUMNS = 120  # of a heat map


@dataclass(frozen=True)
class Series:
    """One line of a run: `points`, and where several values became one point, (x, lowest, highest) in `band`.

    run     index of the run, which decides the colour unless `shade` (0..1) does
    kind    what the line is of that run; drawn dashed for validation
    """

    run: int
    name: str
    points: Points
    kind: str = ""
    dashed: bool = False
    shade: float | None = None
    band: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.name} {self.kind}".strip()


@dataclass(frozen=True)
class Chart:
    """Lines over one x axis; no series: no run has logged it. The y axis ends at `y_top`, and begins at 0 if told."""

    id: str
    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    log_y: bool = False
    y_top: float | None = None
    from_zero: bool = False

    @property
    def always_zero(self) -> bool:
        """Whether there is something, but nothing to see."""
        return bool(self.series) and not any(y for line in self.series for _, y in line.points)


@dataclass(frozen=True)
class HeatMap:
    """Load of one layer's experts over training: `load[column][expert]`, relative to the mean load."""

    id: str
    title: str
    run: int
    layer: int
    tokens: list[float]
    load: list[list[float]]


@dataclass(frozen=True)
class XAxis:
    """One way to measure progress."""

    key: str
    metric: str
    title: str
    label: str
    scale: float = 1.0


def thinned(points: Points, limit: int = MAX_POINTS) -> tuple[Points, list[tuple[float, float, float]]]:
    """At most `limit` points, as means over equal stretches, and the stretches' ranges; all points if there are fewer.

    The last point stays itself: it is what people compare with the table.
    """
    if len(points) <= limit:
        return points, []
    cuts = [round(i * (len(points) - 1) / (limit - 1)) for i in range(limit)]
    parts = [points[a:b] for a, b in pairwise(cuts)] + [points[-1:]]
    middles = [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
    bands = [(m[0], min(y for _, y in p), max(y for _, y in p)) for m, p in zip(middles, parts, strict=True)]
    return middles, bands


def x_axes(runs: Sequence[Run]) -> list[XAxis]:
    """Tokens, wall time in the unit that suits the longest run, active FLOPs."""
    longest = max((run.last(metrics.WALL_TIME) or 0) for run in runs)
    unit, seconds = next((u for u in (("h", 3600.0), ("min", 60.0)) if longest >= 3 * u[1]), ("s", 1.0))
    return [
        XAxis("tokens", metrics.TOKENS, "tokens", "training tokens"),
        XAxis("wall_time", metrics.WALL_TIME, "wall time", f"wall time ({unit})", 1 / seconds),
        XAxis("active_flops", metrics.ACTIVE_FLOPS, "active FLOPs", "active FLOPs"),
    ]


def _line(run: int, name: str, points: Points, **more: Any) -> list[Series]:
    if not points:
        return []
    middles, band = thinned(points)
    return [Series(run, name, middles, band=band, **more)]


def _lines(runs: Sequence[Run], y: str, x: XAxis, **more: Any) -> list[Series]:
    out = []
    for i, run in enumerate(runs):
        out += _line(i, run.name, [(a * x.scale, b) for a, b in run.points(y, x.metric)], **more)
    return out


def _train_and_valid(runs: Sequence[Run], train: str, what: str, x: XAxis) -> list[Series]:
    series = _lines(runs, train, x, kind="train")
    for name in dict.fromkeys(name for run in runs for name in run.valid_sets()):
        metric = metrics.valid_metric(name, what)
        series += _lines(with_x(runs, x.metric), metric, x, kind=name, dashed=True)
    return series


def _perplexity(runs: Sequence[Run], x: XAxis) -> Chart:
    series = _train_and_valid(runs, metrics.PERPLEXITY, "perplexity", x)
    title = f"Perplexity over {x.title}"
    return Chart(f"perplexity_{x.key}", title, x.label, "perplexity", series, log_y=True, y_top=_after_start(series))


def _after_start(series: Sequence[Series]) -> float | None:
    """The highest value after the first twentieth of training; the fall before it would press the rest flat."""
    later = []
    for line in series:
        start = line.points[0][0] + 0.05 * (line.points[-1][0] - line.points[0][0])
        later += [y for x, y in line.points if x >= start]
    return max(later, default=None)


def with_x(runs: Sequence[Run], x: str) -> list[Run]:
    """Runs whose evaluation records, which hold no `x` of their own, take the last one logged before them."""
    out = []
    for run in runs:
        records, last = [], None
        for record in run.records:
            last = record.get(x, last)
            records.append(record if last is None else {**record, x: last})
        out.append(Run(run.name, run.folder, records, run.config))
    return out


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Every line chart that compares runs, in reading order."""
    axes = x_axes(runs)
    tokens = axes[0]

    def over_tokens(key: str, title: str, y_label: str, metric: str, **more: Any) -> Chart:
        return Chart(key, title, tokens.label, y_label, _lines(runs, metric, tokens), **more)

    losses = _train_and_valid(runs, metrics.LOSS, "loss", tokens)
    speed = {"from_zero": True}
    return [
        *(_perplexity(runs, x) for x in axes),
        Chart("loss", "Cross-entropy", tokens.label, "nats per token", losses, y_top=_after_start(losses)),
        over_tokens("balance", "Load-balancing loss", "weighted loss", metrics.LOAD_BALANCING_LOSS),
        over_tokens("z_loss", "Router z-loss", "weighted loss", metrics.ROUTER_Z_LOSS),
        over_tokens(
            "throughput", "Throughput", "tokens/s per device", metrics.TOKENS_PER_SECOND_PER_GPU, from_zero=True
        ),
        over_tokens("mfu", "Model FLOPs utilisation", "fraction of peak", metrics.MFU, **speed),
        over_tokens("memory", "Peak memory", "GiB", metrics.PEAK_MEMORY, **speed),
        over_tokens("grad_norm", "Gradient norm", "norm before clipping", metrics.GRAD_NORM, log_y=True),
        over_tokens("lr", "Learning rate", "learning rate", metrics.LR),
        over_tokens("violation", "Load of the busiest expert", "max/mean load - 1", metrics.MAX_VIOLATION),
        over_tokens("dropped", "Dropped slots", "fraction of routed slots", metrics.DROPPED_FRACTION),
    ]


def entropy_chart(runs: Sequence[Run], index: int) -> Chart:
    """Routing entropy of each MoE layer of one run, shaded by depth."""
    run, layers = runs[index], runs[index].layer_ids()
    series = []
    for place, layer in enumerate(layers):
        points = run.points(metrics.layer_metric(layer, "entropy"))
        series += _line(index, f"layer {layer}", points, shade=place / max(len(layers) - 1, 1))
    title = f"Routing entropy, {run.name}"
    return Chart(f"entropy_{index}", title, "training tokens", "entropy / log(experts)", series)


def heat_maps(runs: Sequence[Run], index: int) -> list[HeatMap]:
    """One heat map per MoE layer of one run."""
    out = []
    for layer in runs[index].layer_ids():
        loads = runs[index].loads(layer)
        size = max(len(loads) / MAX_COLUMNS, 1.0)
        cuts = [round(i * size) for i in range(math.ceil(len(loads) / size))]
        parts = [loads[a:b] for a, b in zip(cuts, [*cuts[1:], len(loads)], strict=True)]
        columns = [_mean([shares for _, shares in part]) for part in parts if part]
        relative = [[round(share * len(column), 4) for share in column] for column in columns]
        tokens = [part[-1][0] for part in parts if part]
        out.append(HeatMap(f"heat_{index}_{layer}", f"Layer {layer}", index, layer, tokens, relative))
    return out


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def plain(item: Chart | HeatMap) -> dict[str, Any]:
    """JSON for the page's script; numbers keep five significant digits."""
    values = asdict(item)
    for series, of in zip(values.get("series", []), getattr(item, "series", []), strict=True):
        series["label"] = of.label
        for key in ("points", "band"):
            series[key] = [[float(f"{v:.5g}") for v in point] for point in series[key]]
    return values
