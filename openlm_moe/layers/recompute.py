"""Activation checkpointing that keeps the first forward's routing.

A router that runs again may break near-ties differently, and then the recomputed rows belong to other experts than the
saved ones: wrong gradients on one process, a crash or a hang with expert parallelism. So what was chosen in the first
forward is remembered and handed out again in each recompute, for both kinds of checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

Value = TypeVar("Value")


class _Memo:
    """Choices of one checkpointed call, in the order in which they were made."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._position = 0
        self._recorded = False

    def __enter__(self) -> None:
        self._position = 0
        _active.append(self)

    def __exit__(self, *error: object) -> None:
        _active.pop()
        self._recorded = True

    def take(self, choose: Callable[[], Value]) -> Value:
        if not self._recorded:
            self._values.append(choose())
        value = self._values[self._position]
        self._position += 1
        return value


# A plain stack, not a context variable: on a GPU the recompute runs on autograd's thread, which inherits none.
_active: list[_Memo] = []


def remember(choose: Callable[[], Value]) -> Value:
    """`choose()`, or inside a recompute what `choose()` returned in the first forward.

    Calls must come in the same order in the forward and in its recompute.
    """
    return _active[-1].take(choose) if _active else choose()


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` for functions that contain MoE layers: the recompute reuses the routing.

    Calls may be nested.
    """
    memo = remember(_Memo)

    def run(*inputs: Any) -> Any:
        with memo:
            return function(*inputs, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant)
