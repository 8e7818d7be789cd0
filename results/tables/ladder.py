"""The perplexity ladder: each size and arm of the sweep, and the ratios that the published table has too."""

from __future__ import annotations

from openlm_moe.plan import published
from results.tables.markdown import NOT_RUN, mean_and_range, number, table
from results.tables.runs import Arm, Sweep, ratios

DENSE, MATCHED, DMOE, MORE = "dense", "dense-2x", "dmoe-8", "dmoe-32"


def make(sweep: Sweep) -> str:
    return "\n\n".join(["\n\n".join(_size(sweep, size) for size in sweep.sizes()), _beside_published(sweep)])


def _size(sweep: Sweep, size: str) -> str:
    tokens, shape = sweep.ladder_tokens(size), sweep.queue["sizes"][size]
    head = (
        f"**{size}**: dim {shape['hidden_dim']}, {shape['n_layers']} layers, {shape['corpus']} corpus, "
        f"{tokens / 1e6:.1f}M tokens"
    )
    arms = [sweep.arm(size, name) for name in sweep.ladder_arms(size)]
    if not any(arm.runs for arm in arms):
        return f"{head}: {NOT_RUN}."
    dense = next(arm for arm in arms if arm.name == DENSE)
    rows = [_row(arm, dense) for arm in arms]
    header = [
        "arm",
        "parameters, active",
        "MFLOPs a token",
        "seeds",
        "perplexity",
        "/ dense",
        "dropped",
        "learning rate",
    ]
    return f"{head}.\n\n{table(header, rows)}"


def _row(arm: Arm, dense: Arm) -> list[object]:
    record = arm.any_run
    if record is None:
        return [arm.what, *[NOT_RUN] * 7]
    count = record["parameters"]
    rate = f"{arm.lr:g}" if arm.tried == arm.rates else f"{arm.lr:g}, {arm.tried} of {arm.rates} tried"
    return [
        arm.what,
        f"{count['total'] / 1e6:.2f}M, {count['active'] / 1e6:.2f}M",
        f"{record['flops_per_token'] / 1e6:.2f}",
        len(arm.runs),
        mean_and_range(arm.perplexities),
        mean_and_range(ratios(arm, dense), 3),
        f"{arm.dropped:.1%}",
        rate,
    ]


def _beside_published(sweep: Sweep) -> str:
    rows: list[list[object]] = []
    for size in sweep.sizes():
        arms = {name: sweep.arm(size, name) for name in (DENSE, MATCHED, DMOE, MORE)}
        pairs = ((DMOE, DENSE), (DMOE, MATCHED), (MORE, DENSE), (MORE, DMOE))
        rows.append([f"{size}, here", *(mean_and_range(ratios(arms[a], arms[b]), 3) for a, b in pairs)])
    for model in published.MODELS:
        eight, more = published.perplexity_ratio(model, 8), published.perplexity_ratio(model, 32)
        over = published.perplexity_ratio(model, 32, 8)
        more_cells = ["-" if value is None else number(value, 3) for value in (more, over)]
        rows.append([f"{model}, published", number(eight, 3), "-", *more_cells])
    header = ["perplexity ratio", "8 / dense", "8 / dense of equal active FLOPs", "32 / dense", "32 / 8"]
    return table(header, rows) + "\n\n" + _verdict(sweep)


def _verdict(sweep: Sweep) -> str:
    """Whether 32 experts beat 8, in a sentence a size."""
    told = [m for m in published.MODELS if published.perplexity_ratio(m, 32, 8)]
    worse = [m for m in told if (published.perplexity_ratio(m, 32, 8) or 0) > 1]
    out = [f"Do 32 experts beat 8? Published: they are worse at {len(worse)} of {len(told)} sizes."]
    for size in sweep.sizes():
        out.append(f"{size} here: {compared(ratios(sweep.arm(size, MORE), sweep.arm(size, DMOE)))}.")
    return " ".join(out)


def compared(found: list[float]) -> str:
    """Which of two the ratios of their perplexities, one a seed, speak for."""
    if not found:
        return NOT_RUN
    better = sum(ratio < 1 for ratio in found)
    mean = sum(found) / len(found)
    many = f"{len(found)} seed{'s' if len(found) > 1 else ''}"
    if better in (0, len(found)):
        return f"{'yes' if better else 'no'}, ratio {mean:.3f} ({many})"
    return f"undecided, better with {better} of {many}, mean ratio {mean:.3f}"
