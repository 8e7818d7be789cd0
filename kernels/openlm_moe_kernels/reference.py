"""The reference backend: every operation said as plainly as torch allows, fp64-capable.

Slow, and short enough to check by eye; the other backends are compared with it. Shape letters as in `backend.py`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from openlm_moe_kernels import composition
from openlm_moe_kernels.formulas import accumulation, activate, activate_backward
from openlm_moe_kernels.plan import RoutePlan, groups


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def tile_map(offsets_E: Tensor, num_rows: int) -> Tensor:
    return offsets_E.new_empty(0)


def tile_map_shape(num_rows: int, num_experts: int) -> tuple[int, ...]:
    return (0,)


def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    trans_w: bool = False,
    gather: Tensor | None = None,
    activation: str | None = None,
    row_scale: Tensor | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    acc = accumulation(x.dtype)
    w = w.mT if trans_w else w
    rows = x.shape[0] if gather is None else gather.shape[0]
    out = x.new_zeros(rows, w.shape[2] // 2 if activation == "swiglu" else w.shape[2])
    for e, start, end in groups(offsets):
        x_e = x[start:end] if gather is None else x[gather[start:end]]
        y = activate(x_e.to(acc) @ w[e].to(acc), activation)
        out[start:end] = y if row_scale is None else y * row_scale[start:end, None].to(acc)
    return out


def grouped_gemm_wgrad(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    *,
    trans_w: bool = False,
    gather: Tensor | None = None,
    out: Tensor | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    acc = accumulation(x.dtype)
    if out is None:
        shape = (dy.shape[1], x.shape[1]) if trans_w else (x.shape[1], dy.shape[1])
        out = x.new_zeros(offsets.shape[0], *shape)
    for e, start, end in groups(offsets):
        x_e = x[start:end] if gather is None else x[gather[start:end]]
        dw = x_e.to(acc).mT @ dy[start:end].to(acc)
        out[e] = out[e].to(acc) + (dw.mT if trans_w else dw)
    return out


def valid_slots(plan: RoutePlan) -> Tensor:
    """Whether flat slot i was routed to an expert, bool (N,)."""
    return plan.inverse_N < plan.offsets_E[-1]


def gather_rows(x: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None) -> Tensor:
    acc = accumulation(x.dtype)
    rows = x[plan.tokens_N].to(acc)
    if scale_TK is not None:
        rows = rows * scale_TK.reshape(-1)[plan.order_N, None].to(acc)
    return torch.where(valid_slots(plan)[plan.order_N, None], rows, 0.0).to(x.dtype)


def _slot_rows(y: Tensor, plan: RoutePlan) -> Tensor:
    """y_ND in slot order, (T, K, D) in the accumulation dtype."""
    return y[plan.inverse_N].to(accumulation(y.dtype)).reshape(plan.num_tokens, plan.top_k, y.shape[1])


def _valid_TK(plan: RoutePlan) -> Tensor:
    return valid_slots(plan).reshape(plan.num_tokens, plan.top_k)


def combine_topk(y: Tensor, weights_TK: Tensor | None, plan: RoutePlan) -> Tensor:
    rows_TKD = _slot_rows(y, plan)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK[:, :, None].to(rows_TKD.dtype)
    return torch.where(_valid_TK(plan)[:, :, None], rows_TKD, 0.0).sum(1).to(y.dtype)


def combine_topk_dweights(dout: Tensor, y: Tensor, plan: RoutePlan) -> Tensor:
    rows_TKD = _slot_rows(y, plan)
    return torch.where(_valid_TK(plan), (rows_TKD * dout[:, None, :].to(rows_TKD.dtype)).sum(-1), 0.0)


def act_backward(
    pre: Tensor, da: Tensor, offsets: Tensor, activation: str | None, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation(pre.dtype)
    valid = torch.arange(pre.shape[0], device=pre.device) < offsets[-1]
    scale = pre.new_ones(pre.shape[0], dtype=acc) if row_scale is None else row_scale.to(acc)
    pre_acc, da_acc = (torch.where(valid[:, None], t, 0.0).to(acc) for t in (pre, da))
    scale = torch.where(valid, scale, 0.0)[:, None]
    d = scale * da_acc
    act = activate(pre_acc, activation)
    dpre = activate_backward(pre_acc, d, activation)
    return dpre.to(pre.dtype), (scale * act).to(pre.dtype), (da_acc * act).sum(-1)


def ffn_forward(
    x: Tensor,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutePlan,
    activation: str,
    *,
    keep_pre: bool = True,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    ops = sys.modules[__name__]
    return composition.ffn_forward(ops, x, weights_TK, w1, w2, plan, activation, keep_pre, allow_tf32)


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
    *,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ops = sys.modules[__name__]
    return composition.ffn_backward(ops, dout, x, weights_TK, w1, w2, pre, plan, activation, needs, allow_tf32)
