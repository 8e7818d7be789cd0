"""The report's command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openlm_moe.errors import UserError
from openlm_moe.options import Parser
from openlm_moe.telemetry.report.figures import write_pngs
from openlm_moe.telemetry.report.page import html_page
from openlm_moe.telemetry.report.runs import load_runs

PAGE = "index.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report; returns the exit code: 0, or 2 with one line on stderr."""
    parser = Parser("python -m openlm_moe.telemetry.report", description="One HTML page and PNGs from metrics.jsonl.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, which holds its metrics.jsonl")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; made if absent")
    parser.add_argument("--title", default="Training report", help="heading of the page")
    parser.add_argument("--no-png", action="store_true", help="write the page alone; needs no matplotlib")
    args = parser.parse_args(arguments)
    try:
        written = write_report(args.runs, args.out, args.title, png=not args.no_png)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {written[0]} and {len(written) - 1} PNGs")
    return 0


def write_report(folders: Sequence[str | Path], out: Path, title: str, png: bool = True) -> list[Path]:
    """Writes the page, and the PNGs beside it. Returns the paths, the page's first. Raises `UserError`."""
    runs = load_runs(folders)
    try:
        out.mkdir(parents=True, exist_ok=True)
        pngs = write_pngs(runs, out) if png else []
        (out / PAGE).write_text(html_page(runs, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; name another --out") from None
    return [out / PAGE, *pngs]


if __name__ == "__main__":
    sys.exit(main())
