"""Perplexity on validation sets: every sample once, token-weighted, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from openlm_moe.data.evaluation import EvaluationSet
from openlm_moe.hosts.builtin.lm_loss import summed_loss
from openlm_moe.hosts.builtin.precision import Precision
from openlm_moe.hosts.builtin.targets import IGNORE, Masking, make_example
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.meters import perplexity


@dataclass(frozen=True)
class Evaluation:
    """One validation set's cross-entropy per token, and over how many tokens and samples."""

    name: str
    loss: float
    tokens: int
    samples: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Under the names of `telemetry.metrics`; `suffix` tells an averaged model's apart."""
        name = self.name + suffix
        return {
            metrics.valid_metric(name, "loss"): self.loss,
            metrics.valid_metric(name, "perplexity"): self.perplexity,
        }


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sets: Sequence[EvaluationSet],
    *,
    batch_size: int,
    masking: Masking,
    precision: Precision,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
) -> list[Evaluation]:
    """Evaluates `sets` one by one, `batch_size` samples a rank and step. Every rank calls it and gets the same answer.

    The model is in its previous mode afterwards.
    """
    training = model.training
    model.eval()
    out = []
    for data in sets:
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in data.batches(batch_size, rank=rank, world_size=world_size, workers=workers):
            mask = None if batch["mask"] is None else batch["mask"].to(device)
            example = make_example(batch["tokens"].to(device), mask, masking)
            with precision.autocast():
                logits = model(example.inputs, example.mask)
            sums[0] += summed_loss(logits, example.targets).cross_entropy
            sums[1] += (example.targets != IGNORE).sum()
        if world_size > 1:
            dist.all_reduce(sums)
        total, tokens = sums.tolist()
        out.append(Evaluation(data.name, total / max(tokens, 1), int(tokens), data.num_samples))
    model.train(training)
    return out
