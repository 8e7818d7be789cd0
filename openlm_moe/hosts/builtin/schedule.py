"""The learning rate of a step, by open_lm's schedules."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `lr`, then cosine, constant, or constant with a polynomial cool-down.

    kind: "cosine" | "const" | "const-cooldown" | "flat" (`lr` from the first step, without warm-up).
    end: learning rate at `total_steps`, reached by cosine and const-cooldown.
    floor: cosine never goes below it after warm-up.
    """

    kind: str
    lr: float
    warmup: int
    total_steps: int
    end: float = 0.0
    floor: float = 0.0
    cooldown_steps: int = 0
    power: float = 1.0

    def __call__(self, step: int) -> float:
        """Learning rate of the optimizer step after `step` steps done."""
        if self.kind == "flat":
            return self.lr
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / (self.total_steps - self.warmup)
            return max(self.end + 0.5 * (1 + math.cos(math.pi * done)) * (self.lr - self.end), self.floor)
        start = self.total_steps - self.cooldown_steps
        if self.kind == "const" or step < start:
            return self.lr
        left = 1 - (step - start) / self.cooldown_steps
        return self.end + left**self.power * (self.lr - self.end)


def make_schedule(args: argparse.Namespace, total_steps: int) -> Schedule:
    """The schedule that the flags ask for, over `total_steps` steps of all epochs."""
    return Schedule(
        kind="flat" if args.skip_scheduler else args.lr_scheduler,
        lr=args.lr,
        warmup=args.warmup,
        total_steps=total_steps,
        end=args.lr_cooldown_end,
        floor=args.force_min_lr,
        cooldown_steps=total_steps * (args.epochs_cooldown or 0) // args.epochs,
        power=args.lr_cooldown_power,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every parameter group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
