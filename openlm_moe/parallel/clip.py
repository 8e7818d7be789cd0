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
    grads = [p.grad for p in parameters if p.grad is not None]
    world = dist.get_world_size() if dist.is_initialized() else 1
    squares = [_local_square(grad, world) for grad in grads]
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if world > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(torch.isfinite(norm), scale, torch.ones_like(scale))
        local = [_local(grad) for grad in grads]
        torch._foreach_mul_(local, scale.to(local[0].dtype))
    return norm if any(grad.dtype == torch.float64 for grad in grads) else norm.float()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _local_square(grad: Tensor, world: int) -> Tensor:
    """This rank's part of the squared norm of `grad` (float64 scalar): summed over the world it is the whole."""
    holders = world  # ranks that hold a copy of each element
    if isinstance(grad, DTensor):
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            if placement.is_partial():
                raise ValueError("a gradient is still a partial sum: clip after the last backward of the step")
            if not placement.is_replicate():
                holders //= size
    local = _local(grad)
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(local, dtype=wide).double().square() / holders
