"""One gradient norm over parameters that live on several meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before that (scalar).

    The norm is that of one process holding every parameter, and the same number on every rank, so that whatever is
    decided by it (to skip a step, say) is decided by all. A norm that is not finite leaves the gradients alone.
    `max_norm=None` only measures.

    `torch.nn.utils.clip_grad_norm_` cannot do this: it refuses parameters on more than one mesh. Here each rank adds up
    the squares of what it holds, divided by how often each element is held, and one all-reduce joins them.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    return clip_held_grads_([(p.grad, _holders(p.grad, world)) for p in parameters if p.grad is not None], max_norm)


@torch.no_grad()
def clip_held_grads_(held: list[tuple[Tensor, int]], max_norm: float | None) -> Tensor:
    """`clip_grad_norm_` of gradients of which it is known how many ranks hold each element: (gradient, ranks)."""
    grads = [_local(grad) for grad, _ in held]
    squares = [_square(grad) / ranks for grad, (_, ranks) in zip(grads, held, strict=True)]
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(torch.isfinite(norm), scale, torch.ones_like(scale))
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm if any(grad.dtype == torch.float64 for grad in grads) else norm.float()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _holders(grad: Tensor, world: int) -> int:
    """How many of the world's ranks hold a copy of each element."""
    holders = world
    if isinstance(grad, DTensor):
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            if placement.is_partial():
                raise ValueError("a gradient is still a partial sum: clip after the last backward of the step")
            if not placement.is_replicate():
                holders //= size
    return holders


def _square(grad: Tensor) -> Tensor:
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(grad, dtype=wide).double().square()
