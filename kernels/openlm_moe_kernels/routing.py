"""From expert ids to a `RoutePlan`, on the device, without waiting for it. Shape letters as in `plan.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import checks
from openlm_moe_kernels.plan import RoutePlan


def route_plan(expert_ids: Tensor, num_experts: int) -> RoutePlan:
    """Sorts slots by expert: counts, offsets, permutation and inverse, and the tile map where triton runs.

    Args:
        expert_ids: (T, K), or (N,) for K = 1, any integer dtype. An id of `num_experts` or more means no expert.
        num_experts: E, at least 1.

    The sort is stable, so the plan is the same each time and keeps the rows of an expert in token order. Nothing waits
    on the device. Raises ValueError for a wrong shape or dtype and, where values are read, for a negative id.
    """
    checks.require(
        expert_ids.dtype in checks.INTEGERS, "expert_ids", lambda: f"has dtype {expert_ids.dtype}; expected integers"
    )
    checks.require(
        expert_ids.dim() == 1 or (expert_ids.dim() == 2 and expert_ids.shape[1] > 0),
        "expert_ids",
        lambda: f"has shape {tuple(expert_ids.shape)}; expected (T, K) or (N,)",
    )
    checks.require(num_experts >= 1, "num_experts", lambda: f"is {num_experts}; it must be 1 or more")
    top_k = expert_ids.shape[1] if expert_ids.dim() == 2 else 1
    return RoutePlan(*_route_plan(expert_ids.reshape(-1), num_experts, top_k), top_k)


@torch.library.custom_op("openlm_moe::route_plan", mutates_args=())
def _route_plan(ids_N: Tensor, num_experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    checks.index_values("expert_ids", ids_N, None)
    ids_N = ids_N.to(torch.int64).clamp(max=num_experts)
    order_N = torch.argsort(ids_N, stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    # Ends of runs in the sorted ids: deterministic, where bincount and scatter_add are not.
    ends_E = torch.searchsorted(ids_N[order_N], torch.arange(num_experts, device=ids_N.device), right=True)
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    offsets_E = ends_E.to(torch.int32)
    return counts_E.to(torch.int32), offsets_E, order_N, inverse_N, order_N // top_k, _tiles(offsets_E, ids_N)


@_route_plan.register_fake
def _(ids_N, num_experts, top_k):
    ends_E, order_N = (
        ids_N.new_empty(n, dtype=d) for n, d in ((num_experts, torch.int32), (ids_N.shape[0], torch.int64))
    )
    shape = backends.load("triton").tile_map_shape(ids_N.shape[0], num_experts) if _has_tiles(ids_N) else (0,)
    return (
        ends_E,
        torch.empty_like(ends_E),
        order_N,
        torch.empty_like(order_N),
        torch.empty_like(order_N),
        ids_N.new_empty(shape, dtype=torch.int32),
    )


def _has_tiles(ids_N: Tensor) -> bool:
    return backends.why_not("triton", ids_N.device, torch.float32) is None


def _tiles(offsets_E: Tensor, ids_N: Tensor) -> Tensor:
    if _has_tiles(ids_N):
        return backends.load("triton").tile_map(offsets_E, ids_N.shape[0])
    return ids_N.new_empty(0, dtype=torch.int32)
