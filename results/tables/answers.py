"""The short answers, read from the records that the tables below show in full."""

from __future__ import annotations

from openlm_moe.plan import published
from results import records
from results.tables import ladder, layer, numerics, throughput
from results.tables.markdown import NOT_RUN
from results.tables.questions import canary_arms
from results.tables.runs import Arm, Sweep, ratios

# (what is asked, an arm, the arm that it is compared with)
COMPARED = (
    ("Do 8 experts, dropless, beat the dense model of the same dim?", "dmoe-8", "dense"),
    ("And the dense model of equal active FLOPs?", "dmoe-8", "dense-2x"),
    ("With combine weights normalised, that one?", "dmoe-8-norm", "dense-2x"),
    ("Does dropless beat capacity 1.25?", "dmoe-8", "capacity-8"),
    ("Do 32 experts beat 8?", "dmoe-32", "dmoe-8"),
)


def make(sweep: Sweep) -> str:
    lines = [f"- {question} {_of_the_sweep(sweep, a, b)}" for question, a, b in COMPARED]
    return "\n".join([*lines, _canary(), _throughput(), _layer(), _numerics()])


def _canary() -> str:
    found, arms = canary_arms()
    tokens = f", {found[0]['tokens'] / 1e6:.1f}M tokens" if found else ""
    says = ladder.compared(ratios(arms["moe"], arms["dense"]))
    return (
        f"- With experts in every layer{tokens}, do 8 beat the dense model of equal active FLOPs? {says.capitalize()}."
    )


def _of_the_sweep(sweep: Sweep, a: str, b: str) -> str:
    """What each size says, whose ladder has both arms."""
    sizes = [size for size in sweep.sizes() if {a, b} <= set(sweep.ladder_arms(size))]
    return "; ".join(f"{size}: {_of_a_size(sweep.arm(size, a), sweep.arm(size, b))}" for size in sizes) + "."


def _of_a_size(first: Arm, second: Arm) -> str:
    text = ladder.compared(ratios(first, second))
    open_ = [arm.what for arm in (first, second) if arm.runs and arm.tried < arm.rates]
    return f"{text}, with the learning rate not tuned yet for {' and '.join(open_)}" if open_ else text


def _throughput() -> str:
    found = list(throughput.newest().values())
    if not found:
        return f"- Throughput: {NOT_RUN}."
    ratios_ = [throughput.measured(r) for r in found]
    told = [published.throughput_ratio(r["model"]) for r in found]
    reached = [throughput.measured(r) / throughput.bound(r) for r in found]
    return (
        f"- Tokens a second with 8 experts over dense, on this CPU: {min(ratios_):.2f} to {max(ratios_):.2f} "
        f"({min(reached):.2f} to {max(reached):.2f} of what FLOPs allow; published on A100 for the same sizes: "
        f"{min(told):.2f} to {max(told):.2f})."
    )


def _layer() -> str:
    found = layer.newest()
    best = [layer.fastest(r) for r in found]
    ours = [r["results"][layer.OURS]["ratio"] for r in found]
    return (
        f"- One layer over a dense one of the same FLOPs: {min(ours):.2f} to {max(ours):.2f} of its time; the "
        f"fastest of {len(found[0]['results']) - 1} ways in {best.count(layer.OURS)} of {len(found)} measurements."
    )


def _numerics() -> str:
    found = records.read(numerics.RECORDS)
    worst = {d: max((r["worst_row"] for r in found if r["dtype"] == d), default=None) for d in numerics.DTYPES}
    text = ", ".join(NOT_RUN if e is None else f"{e:.1e} in {d}" for d, e in worst.items())
    return f"- Largest error of any row of any kernel against float64: {text}."
