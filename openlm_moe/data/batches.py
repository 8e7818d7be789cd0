"""Runs a numbered sequence of batches through torch's DataLoader workers, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from openlm_moe.data.samples import Batch
from openlm_moe.errors import UserError

_PREFETCHED_BATCHES = 4


class NumberedBatches(Protocol):
    """Anything picklable that makes batch n on demand."""

    def __getitem__(self, number: int) -> Batch: ...


def run_batches(job: NumberedBatches, numbers: Iterable[int], workers: int, pin_memory: bool) -> Iterator[Batch]:
    """`job[n]` for each of `numbers`, in that order, computed ahead by `workers` processes (0: here).

    The result is the same for any number of workers. A worker's `UserError` is raised here as it was there.
    """
    loader = torch.utils.data.DataLoader(
        _Guarded(job),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        prefetch_factor=_PREFETCHED_BATCHES if workers else None,
        generator=torch.Generator(),  # else each loader would take a number from the run's own generator
    )
    for batch in loader:
        if isinstance(batch, _Failure):
            raise UserError(batch.message)
        yield batch


class _Failure:
    """A `UserError` on its way from a worker; raised there, it would arrive wrapped in a traceback."""

    def __init__(self, message: str) -> None:
        self.message = message


class _Guarded(torch.utils.data.Dataset):
    def __init__(self, job: NumberedBatches) -> None:
        self.job = job

    def __getitem__(self, number: int) -> Batch | _Failure:
        try:
            return self.job[number]
        except UserError as error:
            return _Failure(str(error))


def _unchanged(batch: Any) -> Any:
    return batch
