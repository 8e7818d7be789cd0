"""A rank's batches, fetched a little before their step, so that all ranks stop together where one cannot read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from openlm_moe import UserError
from openlm_moe.data.samples import Batch
from openlm_moe.parallel import StopRequest
from openlm_moe.parallel.ranks import everywhere, gather

# A stop is followed at most one step later than it is asked for, and a batch is looked at before its step begins.
_AHEAD = 2


class Feed:
    """Iterates over `batches`. Every rank makes one together with the others.

    Data that cannot be read at the start raise `UserError` on every rank. Later, the rank that meets them asks `stop`
    for a stop, which comes before the step that lacks them; `failure` then says why.
    """

    def __init__(self, batches: Iterator[Batch], stop: StopRequest) -> None:
        self._batches, self._stop = batches, stop
        self._ready: deque[Batch] = deque()
        self._error: UserError | None = None
        everywhere(lambda: [self._fetch() for _ in range(_AHEAD)])

    def next(self) -> Batch | None:
        """The batch of the next step; None where the data have ended."""
        batch = self._ready.popleft() if self._ready else None
        if self._error is None:
            try:
                self._fetch()
            except UserError as error:
                self._error = error
                self._stop.request()
        return batch

    def failure(self) -> str | None:
        """What the first rank that could not read its data met, on every rank; None if all could. A collective."""
        return next(filter(None, gather(None if self._error is None else str(self._error))), None)

    def _fetch(self) -> None:
        batch = next(self._batches, None)
        if batch is not None:
            self._ready.append(batch)
