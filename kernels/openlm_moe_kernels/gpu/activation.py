"""GELU (tanh approximation) and SwiGLU with their derivatives, in float32: for GEMM epilogues and for `act_backward`.

Shape letters: N rows, F hidden columns; a SwiGLU pre-activation has 2F, the gate half first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openlm_moe_kernels.gpu.launch import launch
from openlm_moe_kernels.gpu.rows import blocks


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """x/2 * (1 + tanh(u)) = x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3) (Hendrycks and Gimpel 2016)."""
    return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gelu_slope(x):
    s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 3 * 0.044715 * x * x)


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up (Shazeer 2020)."""
    return gate * _sigmoid(gate) * up


@triton.jit
def swiglu_slopes(gate, up):
    """Derivatives of silu(gate) * up by gate and by up."""
    s = _sigmoid(gate)
    return up * s * (1.0 + gate * (1.0 - s)), gate * s


@triton.jit(do_not_specialize=["num_rows"])
def _act_backward(
    pre,
    da,
    dpre,
    act,
    dscale,
    row_scale,
    offsets,
    num_groups,
    num_rows,
    F,
    stride_pn,
    stride_pf,
    stride_an,
    stride_af,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    dtype: tl.constexpr = dpre.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = rows < num_rows
    routed = row_mask & (rows < tl.load(offsets + num_groups - 1))  # the tail is not read, and its results are zero
    scale = tl.where(routed, 1.0, 0.0)
    if row_scale is not None:
        scale = tl.load(row_scale + rows, mask=routed, other=0.0).to(tl.float32)
    scale = scale[:, None]
    acc = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for start in tl.range(0, F, BLOCK_F):
        columns = start + tl.arange(0, BLOCK_F).to(tl.int64)
        load_mask = routed[:, None] & (columns < F)[None, :]
        mask = row_mask[:, None] & (columns < F)[None, :]
        pre_block = pre + rows[:, None] * stride_pn + columns[None, :] * stride_pf
        grad = tl.load(da + rows[:, None] * stride_an + columns[None, :] * stride_af, mask=load_mask, other=0.0)
        grad = grad.to(tl.float32)
        h = tl.load(pre_block, mask=load_mask, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu":
            up = tl.load(pre_block + F * tl.cast(stride_pf, tl.int64), mask=load_mask, other=0.0).to(tl.float32)
            value = swiglu(h, up)
            slope, slope_up = swiglu_slopes(h, up)
            out = dpre + rows[:, None] * (2 * F) + columns[None, :]
            tl.store(out + F, (scale * grad * slope_up).to(dtype), mask=mask)
        else:
            out = dpre + rows[:, None] * F + columns[None, :]
            if ACTIVATION == "gelu":
                value = gelu(h)
                slope = gelu_slope(h)
            else:
                value = h
                slope = 1.0
        tl.store(out, (scale * grad * slope).to(dtype), mask=mask)
        tl.debug_barrier()  # `act` may be `da`: no thread writes before all have read
        tl.store(act + rows[:, None] * F + columns[None, :], (scale * value).to(dtype), mask=mask)
        acc += grad * value
    tl.store(dscale + rows, tl.sum(acc, 1), mask=row_mask)


def act_backward(
    pre: Tensor,
    da: Tensor,
    offsets: Tensor,
    activation: str | None,
    row_scale: Tensor | None = None,
    *,
    overwrite_da: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre (N, F) or (N, 2F), da (N, F) -> (dpre, row_scale * act(pre), <da, act(pre)>); see `Backend.act_backward`.

    With `overwrite_da`, a contiguous `da` becomes the second result, which saves one (N, F) tensor.
    """
    num_rows, width = da.shape
    dpre = torch.empty_like(pre, memory_format=torch.contiguous_format)
    act = da if overwrite_da else torch.empty_like(da, memory_format=torch.contiguous_format)
    dscale = da.new_empty(num_rows, dtype=torch.float32)
    if offsets.shape[0] == 0:  # without groups every row is the tail, and there is no last offset to load
        return dpre.zero_(), act.zero_(), dscale.zero_()
    block_r, block_f = blocks(width)
    launch(
        _act_backward,
        (triton.cdiv(num_rows, block_r),),
        da.device,
        pre=pre,
        da=da,
        dpre=dpre,
        act=act,
        dscale=dscale,
        row_scale=None if row_scale is None else row_scale.contiguous(),
        offsets=offsets,
        num_groups=offsets.shape[0],
        num_rows=num_rows,
        F=width,
        stride_pn=pre.stride(0),
        stride_pf=pre.stride(1),
        stride_an=da.stride(0),
        stride_af=da.stride(1),
        ACTIVATION=activation or "none",
        BLOCK_R=block_r,
        BLOCK_F=block_f,
    )
    return dpre, act, dscale
