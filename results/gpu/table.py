"""The records of `run.py` as tables, a kind after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from results.tables.markdown import table

Record = dict[str, Any]
GIB = 2**30


def render(found: list[Record], missing: list[str]) -> str:
    """All tables; failed steps and those not run are listed at the end."""
    parts = []
    if found:
        machine, versions = found[-1]["machine"], found[-1]["versions"]
        parts.append(f"{machine.get('gpu', machine['cpu'])}; torch {versions['torch']}, triton {versions['triton']}")
    for kind, make in KINDS.items():
        done = [r for r in found if r["kind"] == kind and r["result"] is not None]
        if done:
            parts.append(make(done))
    if failed := [r for r in found if r["exit_code"]]:
        lines = [f"- {r['name']}: {r['exit_code']}: {(r['end_of_output'] or [''])[-1]}" for r in failed]
        parts.append("Failed (exit code and last line):\n\n" + "\n".join(lines))
    if missing:
        parts.append("Not run: " + ", ".join(missing))
    return "\n\n".join(parts)


def _tests(found: list[Record]) -> str:
    words = ("passed", "failed", "error", "skipped")
    rows = [[r["name"].removeprefix("tests-"), *(r["result"][w] for w in words), r["exit_code"]] for r in found]
    return table(["tests of the compiled kernels", *words, "exit code"], rows)


def _numerics(found: list[Record]) -> str:
    worst: dict[tuple[str, str], Record] = {}
    for r in (r for step in found for r in step["result"]):
        key = (r["kernel"], r["dtype"])
        if key not in worst or r["worst_row"] > worst[key]["worst_row"]:
            worst[key] = r
    rows = [[*key, f"{r['error']:.1e}", f"{r['worst_row']:.1e}", r["shape"]] for key, r in sorted(worst.items())]
    return table(["kernel", "dtype", "error against float64", "of the worst row", "worst of all shapes"], rows)


def _train(found: list[Record]) -> str:
    r = found[-1]["result"]
    row = [r["device"], len(r["here"]), f"{r['here'][0]:.6f}", f"{r['cpu'][0]:.6f}", f"{r['early']:.1e}"]
    row += [f"{r['here'][-1]:.4f}", f"{r['cpu'][-1]:.4f}"]
    header = ["training, fp32", "steps", "first loss", "on a CPU", "first 10 apart by", "last loss", "on a CPU"]
    return table(header, [row])


def _model(found: list[Record]) -> str:
    rows = []
    for r in (step["result"] for step in found):
        dense, moe = r["results"]["dense"], r["results"]["moe"]
        what = f"{r['sequences']} x {r['seq_len']}, {r['dtype']}"
        speeds = [f"{m['tokens_per_second']:.0f}" for m in (dense, moe)]
        rows.append([r["model"].rpartition("/")[2], r["moe"]["backend"], what, *speeds, f"{1 / moe['ratio']:.3f}"])
    return table(["full steps", "backend", "tokens", "dense tokens/s", "8 experts tokens/s", "ratio"], rows)


def _memory(found: list[Record]) -> str:
    rows = []
    for r in (step["result"] for step in found):
        peak = "-" if r["peak"] is None else f"{r['peak'] / GIB:.2f} ({r['peak'] / r['plan']:.2f} of the plan)"
        state = f"{r['state'] / GIB:.3f} / {r['plan_state'] / GIB:.3f}"
        rows.append([r["model"], state, f"{r['plan'] / GIB:.2f}", peak])
    return table(["GiB with 8 experts", "state, measured / plan", "peak, plan", "peak, measured"], rows)


def _layer(found: list[Record]) -> str:
    every = [(step["name"], r) for step in found for r in step["result"]]
    names = list(dict.fromkeys(name for _, r in every for name in r["results"]))
    rows = []
    for step, r in every:
        cells = (
            f"{r['results'][n]['ms']:.2f} ({r['results'][n]['ratio']:.2f})" if n in r["results"] else "-" for n in names
        )
        rows.append([step, r["dtype"], r["routing"], *cells])
    return table(["one layer, ms (/ dense)", "dtype", "routing", *names], rows)


def _kernels(found: list[Record]) -> str:
    rows, names = [], []
    for r in (r for step in found for r in step["result"]):
        for product, results in r["results"].items():
            names = list(results)
            cells = (f"{m['ms']:.2f} ({m['ratio']:.2f})" for m in results.values())
            rows.append([r["name"], r["dtype"], r["routing"], product, *cells])
    return table(["products, ms (/ dense)", "dtype", "routing", "product", *names], rows)


def _tune(found: list[Record]) -> str:
    rows = [[r["name"].removeprefix("tune-"), line] for r in found for line in r["result"]]
    return table(["tuned", "entry: shipped configuration, and what became of it"], rows)


KINDS: dict[str, Callable[[list[Record]], str]] = {
    "tests": _tests,
    "numerics": _numerics,
    "train": _train,
    "model": _model,
    "memory": _memory,
    "layer": _layer,
    "kernels": _kernels,
    "tune": _tune,
}
