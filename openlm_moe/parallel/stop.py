"""Stopping at a step edge, all ranks together.

A stop is asked for by a file (the launch script's way: torchrun passes signals on only for the 30 seconds until it
kills), by SIGTERM or SIGUSR1 to any rank, or by any rank's `request`. Each step edge the ranks tell each other what
they saw.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Answers, the same on every rank, whether the run should stop. `file` is looked for by rank 0 alone."""

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)
        self._requested = False
        self._flag: torch.Tensor | None = None
        self._pending: Any = None
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: Any) -> None:
        self.request()

    def request(self) -> None:
        """Asks for a stop of all ranks, from this one."""
        self._requested = True

    def agreed(self) -> bool:
        """To be called once at each step edge by every rank. True on all ranks at the same edge.

        The answer to one edge's question is read at the next edge, so that no rank waits for another here: a request is
        therefore followed at most one step later than it is seen.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._seen()
        answer = False
        if self._flag is not None:
            self._pending.wait()
            answer = bool(self._flag.item())
        self._flag = torch.tensor([int(self._seen())])
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return answer

    def _seen(self) -> bool:
        return self._requested or (self._is_main() and self.file.exists())

    def _is_main(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def close(self) -> None:
        """Restores the signal handlers, and removes the file so that the next start is not stopped by it."""
        if self._pending is not None:
            self._pending.wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._is_main():
            self.file.unlink(missing_ok=True)
