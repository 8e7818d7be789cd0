"""From samples to what the model sees, what it is asked for, and what of it counts. open_lm's masking flags live here.

Shapes: B samples, S = seq_len positions; a sample holds S + 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # target that has no loss


@dataclass(frozen=True)
class Masking:
    """`left`: no loss up to and including the last such token of a sample. `pad`: no loss on it, and no routing of it.

    `squash`: take `left` out of the sample and fill up with `pad` at the right end; the loss then starts behind it.
    """

    left: int | None = None
    pad: int | None = None
    squash: bool = False

    @property
    def active(self) -> bool:
        """Whether some targets may have no loss, so that they must be counted."""
        return self.left is not None or self.pad is not None


@dataclass(frozen=True)
class Example:
    """One batch: inputs (B, S), targets (B, S) with IGNORE where nothing is asked, mask (B, S) False at padding."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None

    def split(self, parts: int) -> list[Example]:
        """`parts` equal micro-batches, in order."""
        masks = [None] * parts if self.mask is None else self.mask.chunk(parts)
        return [Example(*part) for part in zip(self.inputs.chunk(parts), self.targets.chunk(parts), masks, strict=True)]


def make_example(tokens: Tensor, mask: Tensor | None, masking: Masking) -> Example:
    """tokens (B, S + 1) -> `Example`. mask: (B, S + 1), False for padding that the data names, or None."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    seen = None if mask is None else mask[:, :-1]
    if mask is not None:
        targets = targets.masked_fill(~mask[:, 1:], IGNORE)
    if masking.left is not None:
        marks = targets == masking.left
        last_mark_ahead = marks.flip(-1).cumsum(-1).flip(-1) > 0  # this position, or a later one, holds the mark
        if masking.squash:
            if seen is not None:  # padding moves with the rest, and must be known where it comes to lie
                inputs = inputs.masked_fill(~seen, masking.pad)
            targets = targets.masked_fill(last_mark_ahead & ~marks, IGNORE)
            inputs = _without(inputs, masking.left, masking.pad)
            targets = _without(targets, masking.left, masking.pad)
        else:
            targets = targets.masked_fill(last_mark_ahead, IGNORE)
    if masking.pad is not None:
        targets = targets.masked_fill(targets == masking.pad, IGNORE)
        not_padding = inputs != masking.pad
        seen = not_padding if seen is None else seen & not_padding
    return Example(inputs, targets, seen)


def _without(rows: Tensor, token: int, pad: int | None) -> Tensor:
    """`rows` (B, S) with every `token` taken out, what follows moved left, and `pad` at the end."""
    removed = rows == token
    order = torch.argsort(removed.to(torch.uint8), dim=1, stable=True)
    return torch.where(removed.gather(1, order), torch.full_like(rows, pad), rows.gather(1, order))


def count_targets(example: Example) -> int:
    """How many targets of the batch have a loss. Waits for the device."""
    return int((example.targets != IGNORE).sum())
