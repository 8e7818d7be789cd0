"""Cross-entropy of the next token, and the z-loss on the LM head, summed over tokens in fp32.

Shapes: B samples, S positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe.hosts.builtin.targets import IGNORE


class SummedLoss(NamedTuple):
    """Sums over the batch's targets; `z` is not weighted and None where it was not asked for."""

    cross_entropy: Tensor
    z: Tensor | None


def summed_loss(logits: Tensor, targets: Tensor, with_z_loss: bool = False) -> SummedLoss:
    """logits (B, S, V), targets (B, S), IGNORE where there is no loss -> sums over the other positions.

    The z-loss of a token is logsumexp(logits)^2 (PaLM, arXiv 2204.02311, section 5), as in open_lm.
    """
    flat, wanted = logits.flatten(0, 1), targets.flatten()
    with torch.autocast(logits.device.type, enabled=False):
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        cross_entropy = F.cross_entropy(flat, wanted, ignore_index=IGNORE, reduction="sum")
        z = (flat.logsumexp(-1).square() * (wanted != IGNORE)).sum() if with_z_loss else None
    return SummedLoss(cross_entropy, z)
