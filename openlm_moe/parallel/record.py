"""What a piece of a training step communicates, as it happens: for tests of order and for `bench scale`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Names of the c10d operators, as they contain them: FSDP2 and the dispatcher use these forms.
_KINDS = {
    "_allgather_base": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """One collective as this rank sees it. Sizes are of the whole input and output tensors, in bytes."""

    kind: str
    input_bytes: int
    output_bytes: int
    output_numel: int
    ranks: int
    in_backward: bool


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """The collectives of this thread, and of the backward passes it starts, in the order in which they are issued."""
    found: list[Collective] = []
    with _Recorder(found):
        yield found


class _Recorder(TorchDispatchMode):
    def __init__(self, found: list[Collective]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        kind = next((kind for part, kind in _KINDS.items() if name.startswith("c10d::") and part in name), None)
        if kind is not None:
            outputs, inputs = _tensors(args[0]), _tensors(args[1]) or _tensors(args[0])
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            self.found.append(
                Collective(
                    kind,
                    sum(t.numel() * t.element_size() for t in inputs),
                    sum(t.numel() * t.element_size() for t in outputs),
                    sum(t.numel() for t in outputs),
                    torch.distributed.ProcessGroup.unbox(group).size(),
                    torch._C._current_graph_task_id() != -1,
                )
            )
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [part for part in value if isinstance(part, Tensor)] if isinstance(value, (list, tuple)) else []
