"""Work whose result, or whose error, all ranks share, so that none goes on or waits alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from openlm_moe import UserError

T = TypeVar("T")


class ToldElsewhere(UserError):
    """Another rank's `UserError`, raised here so that all stop together; that rank prints it."""


def on_main(function: Callable[[], T]) -> T:
    """`function()` of rank 0, on every rank. A `UserError` there is raised on every rank."""
    return together(lambda: function() if rank() == 0 else None)[0]  # type: ignore[return-value]


def together(function: Callable[[], T]) -> list[T]:
    """Every rank's `function()`, in rank order, on every rank. A `UserError` of any rank is raised on every rank.

    Results are pickled between ranks: let `function` return None where they are large.
    """
    value: T | None = None
    error: UserError | None = None
    try:
        value = function()
    except UserError as caught:
        error = caught
    # An error that was told elsewhere already comes last: whoever has the first of the others tells it.
    told = isinstance(error, ToldElsewhere)
    answers = gather((value, None if error is None else (told, rank(), str(error))))
    failed = min((failure for _, failure in answers if failure is not None), default=None)
    if failed is not None:
        _, first, message = failed
        if error is not None and first == rank():
            raise error
        raise ToldElsewhere(message)
    return [answer for answer, _ in answers]  # type: ignore[misc]


def everywhere(function: Callable[[], T]) -> T:
    """`function()` of every rank, each keeping its own result; a `UserError` of any is raised on all, and told once."""
    own: list[T] = []
    together(lambda: own.append(function()))
    return own[0]


def gather(value: T) -> list[T]:
    """Every rank's `value`, in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    out: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out  # type: ignore[return-value]


def rank() -> int:
    """This rank's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0
