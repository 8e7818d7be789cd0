"""What a run says when it is over: one table, and text that the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openlm_moe.hosts.builtin.architecture import exported_to
from openlm_moe.hosts.builtin.count import short_count
from openlm_moe.hosts.builtin.generate import continue_text
from openlm_moe.hosts.builtin.saving import CHECKPOINTS
from openlm_moe.hosts.builtin.train import mean_recent_loss
from openlm_moe.telemetry.meters import perplexity

if TYPE_CHECKING:
    from openlm_moe.hosts.builtin.train import Run

PROMPTS = ("def read(self, size=-1):\n", "import os\nimport sys\n\n\nclass ")


def summary_table(run: Run, baselines: dict[str, float]) -> list[tuple[str, str]]:
    """(label, value) rows. `baselines`: perplexity of n-gram models on the first validation set, by name."""
    parameters = run.architecture.count()
    rows = [
        ("tokens", f"{run.tokens:,} in {run.step:,} steps"),
        ("train perplexity", f"{perplexity(mean_recent_loss(run)):.2f} (last {len(run.recent)} steps)"),
    ]
    for evaluation in run.evaluations:
        rows.append((f"validation perplexity, {evaluation.name}", f"{evaluation.perplexity:.2f}"))
    if run.evaluations and baselines:
        reached = run.evaluations[0].perplexity
        compared = (f"{name} {value:.2f} (model / {name} = {reached / value:.2f})" for name, value in baselines.items())
        rows.append(("n-grams on the same data", ", ".join(compared)))
    rows += [
        ("tokens/s", f"{run.tokens_per_second:,.0f}"),
        ("parameters", f"{short_count(parameters.total)} in total, {short_count(parameters.active)} active per token"),
    ]
    for layer_id, counts in sorted(run.last_load.items()):
        rows.append((f"expert load, layer {layer_id}", f"max/mean {max_over_mean(counts):.2f}"))
    rows += [
        ("checkpoint", str(run.saver.latest() or f"none in {run.folder / CHECKPOINTS}")),
        ("metrics", str(run.folder / "metrics.jsonl")),
    ]
    exported = exported_to(run.folder, run.step)
    if exported.is_dir():
        rows.append(("Hugging Face model", str(exported)))
    return rows


def max_over_mean(counts: Sequence[int]) -> float:
    """Load of the busiest expert over the mean; 1 when nothing was routed."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Rows as aligned lines between two rules."""
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label.ljust(width)}  {value}" for label, value in rows]
    rule = "-" * min(max(map(len, lines)), 100)
    return "\n".join([rule, *lines, rule])


def samples(run: Run, tokenizer_file: str, new_tokens: int = 64) -> list[str]:
    """A continuation of each of PROMPTS, prompt included. Every rank calls it; none changes the model."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    new_tokens = min(new_tokens, run.architecture.seq_len // 2)
    return [
        prompt + continue_text(run.model, tokenizer, prompt, new_tokens, temperature=0.7, top_k=50, seed=run.args.seed)
        for prompt in PROMPTS
    ]
