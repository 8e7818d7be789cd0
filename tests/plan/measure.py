"""What a training step really holds, tensor by tensor: the other side of the plan's memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from openlm_moe import collect_losses
from openlm_moe.hosts.builtin.lm_loss import summed_loss


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors on this rank."""
    return sum(local(tensor).nbytes for tensor in tensors)


class Saved:
    """Bytes that autograd keeps: every storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sizes: dict[int, int] = {}
        self._alive: list[Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def pack(self, tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if tensor.numel() and storage.data_ptr() not in self._parameters():
            self._sizes.setdefault(storage.data_ptr(), storage.nbytes())
            self._alive.append(tensor)
        return tensor

    def _parameters(self) -> set[int]:
        """Storages of the parameters as they are now: FSDP puts gathered ones in their place."""
        return {local(p).untyped_storage().data_ptr() for p in self._model.parameters()}


def autocast(precision: str) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


@contextmanager
def forward(model: nn.Module, tokens: Tensor, precision: str, z_loss: bool = False) -> Iterator[tuple[Tensor, Saved]]:
    """(loss, what is kept for backward) of one micro-batch, as the trainer computes it."""
    saved = Saved(model)
    with collect_losses(model):
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), autocast(precision):
            logits = model(tokens)
            summed = summed_loss(logits, tokens, z_loss)
            loss = summed.cross_entropy / tokens.numel()
            if summed.z is not None:
                loss = loss + 1e-4 * summed.z / tokens.numel()
        del logits
        yield loss, saved


def peak_of(step: Callable[[], None]) -> int:
    """Most bytes that `step` has allocated at a time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
