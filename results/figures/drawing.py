"""What the figures share: colours, axes without clutter, and a file that is the same each time it is made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from openlm_moe.plan import published
from results.records import RESULTS

HERE = Path(__file__).parent
COLOURS = ("#1f6fd6", "#d9480f", "#0b8457", "#9333b8", "#b07900", "#c2255c", "#0b7c93", "#5f6773", "#222222")


def panels(count: int) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(1, count, figsize=(5.5 * count if count > 1 else 7, 4), layout="constrained")
    found = list(axes) if count > 1 else [axes]
    for one in found:
        one.grid(color="#e9ecf0")
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, found


def empty(axes: Any, what: str) -> None:
    """Says in the panel that there is no record to draw."""
    axes.text(0.5, 0.5, f"{what}: not run", ha="center", va="center", transform=axes.transAxes, color="#5f6773")
    axes.set_xticks([])
    axes.set_yticks([])


def save(figure: Any, path: Path) -> None:
    """Writes the PNG, with the `digest` of what it was drawn from."""
    figure.savefig(path, dpi=110, metadata={"Software": None, "Description": digest()})
    plt.close(figure)


def digest() -> str:
    """SHA-256 of all that figures are drawn from."""
    own = [RESULTS / name for name in ("sweep.jsonl", "sweep_queue.json", "throughput/record.jsonl")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*own, published.FILE))).hexdigest()


def digest_of(path: Path) -> str:
    """The `digest` that a PNG was saved with."""
    from PIL import Image

    with Image.open(path) as image:
        return image.text["Description"]
