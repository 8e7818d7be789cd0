"""Throughput with 8 experts over the dense model's: here, what FLOPs allow, and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openlm_moe.plan import published
from results.figures.drawing import COLOURS, panels, save
from results.tables.throughput import bound, measured, newest, step

NAME = "throughput_ratio.png"


def draw(out: Path) -> None:
    figure, (axes,) = panels(1)
    found = newest()
    models = list(published.MODELS)
    series = {
        "here, on a CPU": [measured(found[m]) if m in found else None for m in models],
        "bound by active FLOPs at the same sequences": [bound(found[m]) if m in found else None for m in models],
        "published, capacity MoE on A100": [published.throughput_ratio(m) for m in models],
    }
    for i, (label, values) in enumerate(series.items()):
        at = [(j + (i - 1) * 0.27, value) for j, value in enumerate(values) if value is not None]
        if at:
            bars = axes.bar([x for x, _ in at], [value for _, value in at], 0.25, color=COLOURS[i], label=label)
            axes.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=1)
    for j, model in enumerate(models):
        if model not in found:
            axes.text(j - 0.14, 0.03, "not run", ha="center", fontsize="x-small", rotation=90, color="#5f6773")
    labels = [m.removeprefix("open_lm_") + (_how(found[m]) if m in found else "") for m in models]
    axes.set_xticks(range(len(models)), labels, fontsize="small")
    axes.set(title="tokens a second, 8 experts / dense", ylim=(0, 1.15), ylabel="ratio")
    axes.axhline(1, color="#222222", lw=0.8)
    axes.legend(fontsize="x-small", frameon=False, loc="upper right", ncols=3)
    save(figure, out / NAME)


def _how(record: dict[str, Any]) -> str:
    return f"\n{step(record)}, {record['seq_len']} a sequence".replace(", ", "\n")
