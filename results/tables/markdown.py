"""Tables in Markdown, and how numbers look in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_RUN = "not run"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """One table; every row has a cell for each column."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        assert len(row) == len(header), row
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    return NOT_RUN if value is None else f"{value:.{digits}f}"


def mean_and_range(values: Sequence[float], digits: int = 2) -> str:
    """ "3.10 (3.05 to 3.15)", of several values; a single one stands alone."""
    if not values:
        return NOT_RUN
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
