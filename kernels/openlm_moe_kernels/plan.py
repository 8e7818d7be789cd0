"""The routing plan: which row of which expert every (token, k) slot becomes. Made once per layer, reused in backward.

Shape letters: T tokens, K top-k, N = T*K routed rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutePlan:
    """Token order <-> expert order, on the device of the expert ids.

    Row n of the expert order is flat slot `order_N[n]` (= t*K + k), that is token `tokens_N[n]`; slot i sits in row
    `inverse_N[i]`. Rows of one expert are contiguous and in slot order (stable). Slots whose id is not an expert's
    (id >= E) come last, in rows at and past `offsets_E[-1]`: they contribute nothing and get zero gradients.
    """

    counts_E: Tensor  # int32, rows per expert
    offsets_E: Tensor  # int32, cumulative ends as in torch.nn.functional.grouped_mm
    order_N: Tensor  # int64
    inverse_N: Tensor  # int64
    tokens_N: Tensor  # int64
    tiles: Tensor  # int32, the triton backend's map from row tile to expert; empty for other backends
    top_k: int

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the fields: what a custom op takes and `RoutePlan(*tensors, top_k)` restores."""
        return [self.counts_E, self.offsets_E, self.order_N, self.inverse_N, self.tokens_N, self.tiles]

    @property
    def num_rows(self) -> int:
        return self.order_N.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets_E.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.num_rows // self.top_k


def make_plan(expert_ids: Tensor, num_experts: int) -> RoutePlan:
    """The plan of (T, K) or (N,) ids in [0, num_experts], already validated, with an empty tile map."""
    top_k = expert_ids.shape[1] if expert_ids.dim() == 2 else 1
    ids_N = expert_ids.reshape(-1).to(torch.int64).clamp(max=num_experts)
    order_N = torch.argsort(ids_N, stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    slots_E = torch.arange(num_experts, device=ids_N.device)
    ends_E = torch.searchsorted(ids_N[order_N], slots_E, right=True)
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    return RoutePlan(
        counts_E=counts_E.to(torch.int32),
        offsets_E=ends_E.to(torch.int32),
        order_N=order_N,
        inverse_N=inverse_N,
        tokens_N=order_N // top_k,
        tiles=ids_N.new_empty(0, dtype=torch.int32),
        top_k=top_k,
    )


def route_plan(expert_ids: Tensor, num_experts: int) -> RoutePlan:
    return make_plan(expert_ids, num_experts)
