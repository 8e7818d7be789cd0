"""Moving rows between token order and expert order: one program a block of rows and columns, no atomics.

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
def _positions(num_rows, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's rows and columns, int64, and their masks."""
    column_blocks = tl.cdiv(D, BLOCK_D)
    rows = (tl.program_id(0) // column_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = (tl.program_id(0) % column_blocks).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    return rows, columns, rows < num_rows, columns < D


@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows(
    x,
    out,
    tokens,
    order,
    scale,
    offsets,
    num_groups,
    num_rows,
    D,
    stride_xt,
    stride_xd,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows, columns, row_mask, column_mask = _positions(num_rows, D, BLOCK_R, BLOCK_D)
    routed = row_mask & (rows < tl.load(offsets + num_groups - 1))  # the tail is not read, and is zero
    token = tl.load(tokens + rows, mask=routed, other=0)
    source = x + token[:, None] * stride_xt + columns[None, :] * stride_xd
    values = tl.load(source, mask=routed[:, None] & column_mask[None, :], other=0.0)
    if scale is not None:
        slot = tl.load(order + rows, mask=routed, other=0)
        factor = tl.load(scale + slot, mask=routed, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * D + columns[None, :], values, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_topk(
    y,
    out,
    weights,
    inverse,
    offsets,
    num_groups,
    num_tokens,
    D,
    stride_yn,
    stride_yd,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens, columns, token_mask, column_mask = _positions(num_tokens, D, BLOCK_R, BLOCK_D)
    routed_rows = tl.load(offsets + num_groups - 1)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tokens * TOP_K + k
        row = tl.load(inverse + slot, mask=token_mask, other=0)
        routed = token_mask & (row < routed_rows)  # the tail is skipped, not read
        source = y + row[:, None] * stride_yn + columns[None, :] * stride_yd
        values = tl.load(source, mask=routed[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + slot, mask=routed, other=0.0).to(tl.float32)[:, None]
        acc += values
    target = out + tokens[:, None] * D + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=token_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _combine_topk_dweights(
    dout,
    y,
    dweights,
    inverse,
    offsets,
    num_groups,
    num_rows,
    D,
    stride_ot,
    stride_od,
    stride_yn,
    stride_yd,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slots = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot_mask = slots < num_rows
    row = tl.load(inverse + slots, mask=slot_mask, other=0)
    routed = slot_mask & (row < tl.load(offsets + num_groups - 1))
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D).to(tl.int64)
        mask = routed[:, None] & (columns < D)[None, :]
        a = tl.load(dout + (slots // TOP_K)[:, None] * stride_ot + columns[None, :] * stride_od, mask=mask, other=0.0)
        b = tl.load(y + row[:, None] * stride_yn + columns[None, :] * stride_yd, mask=mask, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    tl.store(dweights + slots, tl.sum(acc, 1), mask=slot_mask)


def blocks(width: int) -> tuple[int, int]:
    """Rows and columns of a program's block: whole rows where they are short, and about 2048 elements."""
    columns = min(1024, max(16, triton.next_power_of_2(width)))
    return 2048 // columns, columns


def gather_rows(x: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None) -> Tensor:
    """x_TD -> x[plan.tokens] (N, D), the tail zero; row n multiplied by its slot's scale where there is one."""
    width = x.shape[1]
    out = x.new_empty(plan.num_rows, width)
    block_r, block_d = blocks(width)
    launch(
        _gather_rows,
        (triton.cdiv(plan.num_rows, block_r) * triton.cdiv(width, block_d),),
        x.device,
        x=x,
        out=out,
        tokens=plan.tokens_N,
        order=plan.order_N,
        scale=None if scale_TK is None else scale_TK.contiguous(),
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        num_rows=plan.num_rows,
        D=width,
        stride_xt=x.stride(0),
        stride_xd=x.stride(1),
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return out


def combine_topk(y: Tensor, weights_TK: Tensor | None, plan: RoutePlan) -> Tensor:
    """y_ND -> sum over k of weights[t, k] * y[inverse[t*K + k]] (T, D), summed in float32; weights None means ones."""
    width = y.shape[1]
    out = y.new_empty(plan.num_tokens, width)
    block_r, block_d = blocks(width)
    launch(
        _combine_topk,
        (triton.cdiv(plan.num_tokens, block_r) * triton.cdiv(width, block_d),),
        y.device,
        y=y,
        out=out,
        weights=None if weights_TK is None else weights_TK.contiguous(),
        inverse=plan.inverse_N,
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        num_tokens=plan.num_tokens,
        D=width,
        stride_yn=y.stride(0),
        stride_yd=y.stride(1),
        TOP_K=plan.top_k,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return out


def combine_topk_dweights(dout: Tensor, y: Tensor, plan: RoutePlan) -> Tensor:
    """dout_TD, y_ND -> <dout[t], y[inverse[t*K + k]]>, float32 (T, K), zero for tail rows."""
    dweights = y.new_empty(plan.num_tokens, plan.top_k, dtype=torch.float32)
    block_r, block_d = blocks(y.shape[1])
    launch(
        _combine_topk_dweights,
        (triton.cdiv(plan.num_rows, block_r),),
        y.device,
        dout=dout,
        y=y,
        dweights=dweights,
        inverse=plan.inverse_N,
        offsets=plan.offsets_E,
        num_groups=plan.num_experts,
        num_rows=plan.num_rows,
        D=y.shape[1],
        stride_ot=dout.stride(0),
        stride_od=dout.stride(1),
        stride_yn=y.stride(0),
        stride_yd=y.stride(1),
        TOP_K=plan.top_k,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return dweights
