"""How long a run is, in steps, epochs and tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How long a run is. An epoch is --train-num-samples tokens; `step` counts optimizer steps done."""

    global_batch_size: int
    seq_len: int
    samples_per_epoch: int
    epochs: int

    @property
    def total_steps(self) -> int:
        return self.samples_per_epoch * self.epochs // self.global_batch_size

    def epoch_ending_at(self, step: int) -> int | None:
        """The epoch (from 1) that ends with step `step`, the last one where several do; None if none does.

        Epoch e ends at step samples_per_epoch * e // global_batch_size.
        """
        epoch = -(-(step + 1) * self.global_batch_size // self.samples_per_epoch) - 1
        ends = epoch >= 1 and self.samples_per_epoch * epoch // self.global_batch_size == step
        return min(epoch, self.epochs) if ends else None

    def tokens(self, step: int) -> int:
        return step * self.global_batch_size * self.seq_len
