"""The expert feed-forward on the CPU: expert by expert, in blocks of rows whose hidden activations stay in cache.

Each product is written where it belongs (`out=`): hidden rows into the one buffer that is saved, weight gradients into
slices of one stack. Between the two products a block's activations live in a small buffer that the next block reuses,
so memory sees the pre-activation and nothing else of its size. The combine weights are applied to rows of width D, the
narrow side of both products, and in the sum over k, which takes them in the rows' dtype. Shapes as in `ffn.py`; M rows
of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe_kernels.cpu_activation import BlockedActivation
from openlm_moe_kernels.plan import RoutePlan, groups

# Rows of one product. oneDNN halves its speed on 16-bit products of more rows with a long inner size.
BLOCK_ROWS = {2: 640, 4: 2048, 8: 2048}  # by bytes an element


def blocks(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into the fewest blocks of at most BLOCK_ROWS, of nearly equal size."""
    n = -(-(stop - start) // BLOCK_ROWS[itemsize])
    for i in range(n):
        yield start + (stop - start) * i // n, start + (stop - start) * (i + 1) // n


def sum_slots(rows_ND: Tensor, plan: RoutePlan, weights_TK: Tensor | None = None) -> Tensor:
    """out[t] = sum over k of weights[t, k] * (row of slot (t, k)), in float32 (float64). Reads every row."""
    if plan.num_rows == 0:
        return rows_ND.new_zeros(plan.num_tokens, rows_ND.shape[1])
    slots_TK = plan.inverse_N.view(plan.num_tokens, plan.top_k)
    if weights_TK is None:
        return F.embedding_bag(slots_TK, rows_ND, mode="sum")
    return F.embedding_bag(slots_TK, rows_ND, mode="sum", per_sample_weights=weights_TK.to(rows_ND.dtype))


def ffn_forward(
    x: Tensor, weights_TK: Tensor, w1: Tensor, w2: Tensor, plan: RoutePlan, activation: str, keep_pre: bool
) -> tuple[Tensor, Tensor]:
    spans = groups(plan.offsets_E)
    end = spans[-1][2] if spans else 0
    most = min(max((stop - start for _, start, stop in spans), default=0), BLOCK_ROWS[x.itemsize])
    act = BlockedActivation(activation, w2.shape[1], x.dtype)

    x_MD, a_MF = x.new_empty(most, x.shape[1]), x.new_empty(most, w2.shape[1])
    pre = x.new_empty(plan.num_rows if keep_pre else most, w1.shape[2])
    y_ND = x.new_empty(plan.num_rows, w2.shape[2])
    for e, start, stop in spans:
        for a, b in blocks(start, stop, x.itemsize):
            m = b - a
            pre_MF = pre[a:b] if keep_pre else pre[:m]
            torch.index_select(x, 0, plan.tokens_N[a:b], out=x_MD[:m])
            torch.mm(x_MD[:m], w1[e], out=pre_MF)
            act.forward(pre_MF, out=a_MF[:m])
            torch.mm(a_MF[:m], w2[e], out=y_ND[a:b])
    y_ND[end:].zero_()
    if keep_pre:
        pre[end:].zero_()
    return sum_slots(y_ND, plan, _valid_weights(weights_TK, plan, end)), pre if keep_pre else x.new_empty(0, 0)


def ffn_backward(
    dout: Tensor,
    x: Tensor,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    pre: Tensor,
    plan: RoutePlan,
    activation: str,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = groups(plan.offsets_E)
    end = spans[-1][2] if spans else 0
    most = max((stop - start for _, start, stop in spans), default=0)
    act = BlockedActivation(activation, w2.shape[1], x.dtype)
    scale_N1 = weights_TK.reshape(-1)[plan.order_N, None].to(x.dtype)

    need_x, need_weights, need_w1, need_w2 = needs
    dx_ND = x.new_empty(plan.num_rows if need_x else 0, x.shape[1])
    dscale_N = x.new_zeros(plan.num_rows, dtype=act.dtype)
    dw1, dw2 = (w.new_empty(w.shape if need else 0) for w, need in ((w1, need_w1), (w2, need_w2)))
    x_MD, g_MD = x.new_empty(most, x.shape[1]), x.new_empty(most, x.shape[1])
    a_MF, dpre_MF = x.new_empty(most, w2.shape[1]), x.new_empty(most, w1.shape[2])
    da_MF = x.new_empty(min(most, BLOCK_ROWS[x.itemsize]), w2.shape[1])
    for e, start, stop in spans:
        m = stop - start
        torch.index_select(dout, 0, plan.tokens_N[start:stop], out=g_MD[:m])
        for a, b in blocks(0, m, x.itemsize):
            rows, da = slice(start + a, start + b), da_MF[: b - a]
            torch.mm(g_MD[a:b], w2[e].t(), out=da)
            act.backward(pre[rows], da, a_MF[a:b], dpre_MF[a:b], dscale_N[rows])
            if need_x:
                torch.mm(dpre_MF[a:b], w1[e].t(), out=dx_ND[rows])
        if need_w1:
            torch.index_select(x, 0, plan.tokens_N[start:stop], out=x_MD[:m])
            x_MD[:m].mul_(scale_N1[start:stop])
            _transposed_mm(x_MD[:m], dpre_MF[:m], out=dw1[e])
        if need_w2:
            g_MD[:m].mul_(scale_N1[start:stop])
            torch.mm(a_MF[:m].t(), g_MD[:m], out=dw2[e])
    _zero_others(dw1, spans, need_w1)
    _zero_others(dw2, spans, need_w2)
    dx_ND[end:].zero_()
    dx = sum_slots(dx_ND, plan, _valid_weights(weights_TK, plan, end)) if need_x else dx_ND.new_empty(0)
    dweights = dscale_N[plan.inverse_N].view(weights_TK.shape).to(weights_TK.dtype)
    return dx, dweights if need_weights else dweights.new_empty(0), dw1, dw2


def _valid_weights(weights_TK: Tensor, plan: RoutePlan, end: int) -> Tensor:
    """Zero for slots without an expert, whose weight may be anything."""
    if end == plan.num_rows:
        return weights_TK
    return torch.where((plan.inverse_N < end).view(weights_TK.shape), weights_TK, 0.0)


def _transposed_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    """x^T y. oneDNN's 16-bit product is a third faster when the narrow operand is transposed in memory first."""
    torch.mm(x.t().contiguous() if x.itemsize == 2 else x.t(), y, out=out)


def _zero_others(dw: Tensor, spans: list[tuple[int, int, int]], needed: bool) -> None:
    """Experts without rows have zero gradients."""
    if needed:
        for e in set(range(dw.shape[0])).difference(e for e, _, _ in spans):
            dw[e].zero_()
