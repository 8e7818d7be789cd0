"""Makes all tables and figures again from the records, without training: `python -m results.remake`, `make results`.

The tables are the regions of README.md between `<!-- NAME -->` and `<!-- end of NAME -->`; the figures are PNGs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from results.records import RESULTS
from results.tables import answers, ladder, layer, numerics, parameters, provenance, questions, throughput
from results.tables.runs import Sweep

README = RESULTS / "README.md"


def tables() -> dict[str, Callable[[], str]]:
    """{region of the README: what makes its text}."""
    sweep = Sweep()
    return {
        "answers": lambda: answers.make(sweep),
        "perplexity": lambda: ladder.make(sweep),
        "questions": lambda: questions.make(sweep),
        "throughput": throughput.make,
        "layer": layer.make,
        "numerics": numerics.make,
        "parameters": parameters.make,
        "gpu": provenance.gpu,
        "origins": provenance.origins,
        "corpora": lambda: provenance.corpora(sweep),
        "progress": lambda: provenance.progress(sweep),
    }


def remade(text: str) -> str:
    """`text` with every region made anew. Raises `SystemExit` where a region or a table is missing."""
    makers = tables()
    regions = re.findall(r"<!-- (\w+) -->", text)
    if sorted(regions) != sorted(makers):
        raise SystemExit(f"{README}: its regions {regions} must be {list(makers)}, each once")
    for name, make in makers.items():
        whole = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        body = make()
        text, found = whole.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if found != 1:
            raise SystemExit(f"{README}: region {name} has no end")
    return text


def figures() -> tuple[ModuleType, ...]:
    from results.figures import dmoe_capacity, load, perplexity, throughput

    return perplexity, throughput, load, dmoe_capacity


def figure_names() -> list[str]:
    return [figure.NAME for figure in figures()]


def draw_figures(out: Path) -> None:
    for figure in figures():
        figure.draw(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for README.md and figures/ (results/)")
    options = parser.parse_args()
    text = remade(README.read_text())
    (options.out / "figures").mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text(text)
    draw_figures(options.out / "figures")


if __name__ == "__main__":
    main()
