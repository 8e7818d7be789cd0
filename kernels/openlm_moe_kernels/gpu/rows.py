"""Moving rows between token order and expert order: one program a row and column block, no atomics.

Shape letters: T tokens, K top-k, N = T*K routed rows in expert order, D model dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openlm_moe_kernels.gpu.launch import launch
from openlm_moe_kernels.plan import RoutePlan


@triton.jit
def _gather_rows(
    x, out, tokens, order, scale, offsets, num_groups, D, stride_xt, stride_xd, BLOCK_D: tl.constexpr
):
    blocks = tl.cdiv(D, BLOCK_D)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mask = columns < D
    routed = row < tl.load(offsets + num_groups - 1)  # the tail is zero
    token = tl.load(tokens + row)
    values = tl.load(x + token * stride_xt + columns * stride_xd, mask=mask & routed, other=0.0)
    if scale is not None:
        factor = tl.load(scale + tl.load(order + row), mask=routed, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row * D + columns, values, mask=mask)


@triton.jit
def _combine_topk(
    y, out, weights, inverse, offsets, num_groups, D, stride_yn, stride_yd, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    blocks = tl.cdiv(D, BLOCK_D)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mask = columns < D
    routed_rows = tl.load(offsets + num_groups - 1)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + k)
        routed = row < routed_rows  # the tail is skipped, not read
        values = tl.load(y + row * stride_yn + columns * stride_yd, mask=mask & routed, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + token * TOP_K + k, mask=routed, other=0.0).to(tl.float32)
        acc += values
    tl.store(out + token * D + columns, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_topk_dweights(
    dout, y, dweights, inverse, offsets, num_groups, D, stride_ot, stride_od, stride_yn, stride_yd,
    TOP_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse + slot)
    routed = row < tl.load(offsets + num_groups - 1)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        columns = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = (columns < D) & routed
        a = tl.load(dout + slot // TOP_K * stride_ot + columns * stride_od, mask=mask, other=0.0)
        b = tl.load(y + row * stride_yn + columns * stride_yd, mask=mask, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    tl.store(dweights + slot, tl.sum(acc, 0))


def _block(width: int) -> int:
    return min(1024, max(16, triton.next_power_of_2(width)))


def gather_rows(x: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None) -> Tensor:
    """x_TD -> x[plan.tokens] (N, D), the tail zero; row n multiplied by its slot's scale where there is one."""
    width = x.shape[1]
    out = x.new_empty(plan.num_rows, width)
    launch(
        _gather_rows,
        (plan.num_rows * triton.cdiv(width, _block(width)),),
        x.device,
        x=x,
        out=out,
        tokens=plan.tokens_N,
        order=plan.order_N,
        scale=None if scale_TK is None else scale_TK.contiguous(),
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        D=width,
        stride_xt=x.stride(0),
        stride_xd=x.stride(1),
        BLOCK_D=_block(width),
    )
    return out


def combine_topk(y: Tensor, weights_TK: Tensor | None, plan: RoutePlan) -> Tensor:
    """y_ND -> sum over k of weights[t, k] * y[inverse[t*K + k]] (T, D), summed in float32; weights None means ones."""
    width = y.shape[1]
    out = y.new_empty(plan.num_tokens, width)
    launch(
        _combine_topk,
        (plan.num_tokens * triton.cdiv(width, _block(width)),),
        y.device,
        y=y,
        out=out,
        weights=None if weights_TK is None else weights_TK.contiguous(),
        inverse=plan.inverse_N,
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        D=width,
        stride_yn=y.stride(0),
        stride_yd=y.stride(1),
        TOP_K=plan.top_k,
        BLOCK_D=_block(width),
    )
    return out


def combine_topk_dweights(dout: Tensor, y: Tensor, plan: RoutePlan) -> Tensor:
    """dout_TD, y_ND -> <dout[t], y[inverse[t*K + k]]>, float32 (T, K), zero for tail rows."""
    dweights = y.new_empty(plan.num_tokens, plan.top_k, dtype=torch.float32)
    launch(
        _combine_topk_dweights,
        (plan.num_rows,),
        y.device,
        dout=dout,
        y=y,
        dweights=dweights,
        inverse=plan.inverse_N,
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        D=y.shape[1],
        stride_ot=dout.stride(0),
        stride_od=dout.stride(1),
        stride_yn=y.stride(0),
        stride_yd=y.stride(1),
        TOP_K=plan.top_k,
        BLOCK_D=_block(y.shape[1]),
    )
    return dweights
