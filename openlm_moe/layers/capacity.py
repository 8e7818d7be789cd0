"""The capacity rule of GShard and Switch: each expert takes a fixed number of rows, what comes later is dropped.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import route_plan


def expert_capacity(n_tokens: Tensor, n_experts: int, top_k: int, factor: float) -> Tensor:
    """Rows one expert takes: `factor` times the balanced load of so many tokens (a scalar), rounded up."""
    return (n_tokens.double() * factor * top_k / n_experts).ceil()


def drop_over_capacity(experts_TK: Tensor, n_experts: int, capacity: Tensor) -> Tensor:
    """`experts_TK` with every slot past an expert's capacity set to `n_experts` (no expert).

    First choices of all tokens come before any second choice, and earlier tokens before later ones (GShard, arXiv
    2006.16668, algorithm 1). Masked tokens, already at `n_experts`, take no capacity.
    """
    by_choice_KT = experts_TK.t().contiguous()
    plan = route_plan(by_choice_KT, n_experts)
    first_row_E = torch.cat([plan.offsets_E - plan.counts_E, plan.offsets_E[-1:]])
    place_N = plan.inverse_N - first_row_E[by_choice_KT.flatten()]
    kept_KT = torch.where(place_N.view_as(by_choice_KT) < capacity, by_choice_KT, n_experts)
    return kept_KT.t().contiguous()
