"""Questions that are asked in public about mixtures of experts, and what the sweep's smallest size says to them."""

from __future__ import annotations

from typing import Any

from results.records import RESULTS, read
from results.tables.markdown import NOT_RUN, mean_and_range, table
from results.tables.runs import Arm, Sweep, load_curve, ratios

SIZE, MATCHED = "0.1M", "dense-2x"
# question -> arms; each is compared with the first on the seeds that both have
QUESTIONS = {
    "Dropless or capacity?": ("dmoe-8", "capacity-8"),
    "The balancing loss: with, without, a tenth of it, or a selection bias instead?": (
        "dmoe-8",
        "no-balance",
        "balance-0.01",
        "bias-balance",
    ),
    "Experts in every other layer, every, every fourth, at equal active FLOPs?": ("dmoe-8", "every-1", "every-4"),
    "Top-2, 1 or 4?": ("dmoe-8", "top-1", "top-4"),
    "Combine weights as they are, or normalised?": ("dmoe-8", "dmoe-8-norm"),
}


def make(sweep: Sweep) -> str:
    rows: list[list[object]] = []
    for question, names in QUESTIONS.items():
        first = sweep.arm(SIZE, names[0])
        for name in names:
            rows.append(_row(question if name == names[0] else "", sweep.arm(SIZE, name), first))
    header = ["question", "arm", "seeds", "perplexity", "/ first", "MFLOPs a token", "busiest expert / mean", "dropped"]
    return "\n\n".join([table(header, rows), _more_tokens(sweep), _upcycling(sweep), canary()])


def _row(question: str, arm: Arm, first: Arm) -> list[object]:
    record = arm.any_run
    if record is None:
        return [question, arm.what, 0, *[NOT_RUN] * 5]
    loads = [curve[-1][1] for r in arm.runs.values() if (curve := load_curve(r))]
    return [
        question,
        arm.what,
        len(arm.runs),
        mean_and_range(arm.perplexities),
        mean_and_range(ratios(arm, first), 3),
        f"{record['flops_per_token'] / 1e6:.2f}",
        mean_and_range(loads),
        f"{arm.dropped:.1%}",
    ]


def _more_tokens(sweep: Sweep) -> str:
    """The arms that the queue trains on more tokens too, with few and with many."""
    stage = next(s for s in sweep.queue["stages"] if s["name"] == "more tokens")
    few, many = sweep.ladder_tokens(SIZE), stage["tokens"]
    rows = []
    for name in stage["arms"]:
        arms = [(sweep.arm(SIZE, name, n), sweep.arm(SIZE, MATCHED, n)) for n in (few, many)]
        what = sweep.queue["arms"][name]["what"]
        cells = [cell for a, b in arms for cell in (mean_and_range(a.perplexities), mean_and_range(ratios(a, b), 3))]
        rows.append([what, *cells])
    header = ["do experts need more tokens?"]
    for n in (few, many):
        header += [f"perplexity, {n / 1e6:.1f}M tokens", "/ dense of equal active FLOPs"]
    return table(header, rows)


def _upcycling(sweep: Sweep) -> str:
    """Upcycled after T tokens of dense training and T of its own, against 2 T from scratch and 2 T dense."""
    tokens = sweep.ladder_tokens(SIZE)
    chosen = [
        ("dense-swiglu", tokens, "dense, which it grows from"),
        ("upcycled-8", tokens, "8 experts grown from it"),
        ("swiglu-8", tokens, "8 experts from scratch, as many tokens as after growing"),
        ("swiglu-8", 2 * tokens, "8 experts from scratch, as many tokens in all"),
        ("dense-swiglu", 2 * tokens, "dense, as many tokens in all"),
    ]
    rows = [[what, f"{n / 1e6:.1f}M", mean_and_range(sweep.arm(SIZE, arm, n).perplexities)] for arm, n, what in chosen]
    return table(["upcycled or from scratch?", "tokens", "perplexity"], rows)


def canary_arms() -> tuple[list[dict[str, Any]], dict[str, Arm]]:
    """(the records of `results/canary.py` of the newest settings, the same by arm)."""
    every = read(RESULTS / "canary.jsonl")
    found = [r for r in every if (r["model"], r["steps"]) == (every[-1]["model"], every[-1]["steps"])]
    named = {"moe": "8 experts, dropless", "no_balance": "8 experts, no balancing loss", "dense": "dense"}
    return found, {
        arm: Arm(arm, what, None, 0, 0, {r["seed"]: r for r in found if r["arm"] == arm}) for arm, what in named.items()
    }


def canary() -> str:
    """Experts in every layer, weights normalised, against the dense model of equal active FLOPs."""
    found, arms = canary_arms()
    if not found:
        return f"Canary: {NOT_RUN}."
    rows = [
        [
            arm.what,
            len(arm.runs),
            mean_and_range(arm.perplexities),
            mean_and_range(ratios(arm, arms["dense"]), 3),
            mean_and_range([r["max_over_mean"] for r in arm.runs.values()]),
        ]
        for arm in arms.values()
    ]
    dim, tokens = found[0]["model"]["hidden_dim"], found[0]["tokens"] / 1e6
    head = f"experts in every layer, weights normalised, dim {dim}, {tokens:.1f}M tokens, equal active FLOPs"
    return table([head, "seeds", "perplexity", "/ dense", "busiest expert / mean"], rows)
