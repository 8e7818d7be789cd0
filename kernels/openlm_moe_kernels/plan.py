"""The routing plan: which row of which expert every (token, k) slot becomes. Made once per layer, reused in backward.

Shape letters: T tokens, K top-k, N = T*K routed rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    tiles: Tensor  # int32, the triton backend's map from row tile to expert; empty where triton does not run
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


def groups(offsets_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of each non-empty group. Waits on the device of the offsets."""
    ends = offsets_E.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if end > start]
