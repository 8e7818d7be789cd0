"""Grouped GEMM: every group of rows times its own matrix, with gathered rows and a fused epilogue.

Shape letters: M rows, K inner dimension, N columns, E groups; BLOCK_* are tile sizes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.activation import gelu, swiglu
from openlm_moe_kernels.gpu.launch import launch, persistent_grid, precision
from openlm_moe_kernels.gpu.tiles import most_tiles, section, tile_map


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """`GROUP` row tiles share each column tile before the next one, so that weights stay in the L2 cache."""
    band = GROUP * column_tiles
    first = tile // band * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + tile % band % height, tile % band // height


@triton.jit
def _load_weights(
    w,
    block,
    group,
    k,
    column0,
    mask,
    TMA: tl.constexpr,
    TRANS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if TMA:
        if TRANS:
            return w.load([group, column0, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            return w.load([group, k, column0]).reshape(BLOCK_K, BLOCK_N)
    else:
        return tl.load(block, mask=mask, other=0.0)


@triton.jit
def _grouped_gemm(
    x,
    w,
    y,
    pre,
    gather,
    row_scale,
    tiles,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wk,
    stride_wn,
    ACTIVATION: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    W_TRANS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    row_tiles = tl.load(tiles)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP)
        entry = tiles + 4 * (1 + row_tile)
        group = tl.load(entry)
        row0 = tl.load(entry + 1)
        end = tl.load(entry + 2)
        column0 = column_tile * BLOCK_N

        rows = (row0 + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = (column0 + tl.arange(0, BLOCK_N)).to(tl.int64)
        inner = tl.arange(0, BLOCK_K).to(tl.int64)
        row_mask = rows < end
        column_mask = columns < N
        mask = row_mask[:, None] & column_mask[None, :]

        x_block = None
        w_block = None
        up_block = None
        if not X_TMA:
            source = rows
            if gather is not None:
                source = tl.load(gather + rows, mask=row_mask, other=0)
            x_block = x + source[:, None] * stride_xm + inner[None, :] * stride_xk
        if not W_TMA:
            w_block = w + group.to(tl.int64) * stride_we + inner[:, None] * stride_wk + columns[None, :] * stride_wn
            up_block = w_block + N * tl.cast(stride_wn, tl.int64)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # The tail's tiles (group -1) run no iteration: their rows may hold NaN, and 0 * NaN is NaN.
        for k in tl.range(0, tl.where(group >= 0, K, 0), BLOCK_K):
            inner_mask = inner < K - k
            w_mask = inner_mask[:, None] & column_mask[None, :]
            if X_TMA:
                a = x.load([row0, k])
            else:
                a = tl.load(x_block, mask=row_mask[:, None] & inner_mask[None, :], other=0.0)
                x_block += BLOCK_K * tl.cast(stride_xk, tl.int64)
            b = _load_weights(w, w_block, group, k, column0, w_mask, W_TMA, W_TRANS, BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if ACTIVATION == "swiglu":
                b_up = _load_weights(w, up_block, group, k, N + column0, w_mask, W_TMA, W_TRANS, BLOCK_K, BLOCK_N)
                acc_up = tl.dot(a, b_up, acc_up, input_precision=PRECISION)
            if not W_TMA:
                w_block += BLOCK_K * tl.cast(stride_wk, tl.int64)
                if ACTIVATION == "swiglu":
                    up_block += BLOCK_K * tl.cast(stride_wk, tl.int64)

        # Activations take the pre-activation as stored, so that the backward recomputes exactly what the forward used.
        if ACTIVATION == "gelu":
            h = acc.to(dtype)
            if pre is not None:
                tl.store(pre + rows[:, None] * N + columns[None, :], h, mask=mask)
            acc = gelu(h.to(tl.float32))
        if ACTIVATION == "swiglu":
            gate = acc.to(dtype)
            up = acc_up.to(dtype)
            if pre is not None:
                pre_block = pre + rows[:, None] * (2 * N) + columns[None, :]
                tl.store(pre_block, gate, mask=mask)
                tl.store(pre_block + N, up, mask=mask)
            acc = swiglu(gate.to(tl.float32), up.to(tl.float32))
        if row_scale is not None:
            scale = tl.load(row_scale + rows, mask=row_mask & (group >= 0), other=0.0)
            acc *= scale.to(tl.float32)[:, None]
        tl.store(y + rows[:, None] * N + columns[None, :], acc.to(dtype), mask=mask)


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
    keep_pre: bool = False,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`Backend.grouped_gemm`, which also returns the pre-activation (M, N) or (M, 2N) with `keep_pre`.

    `tiles` is the `tile_map` of `offsets`, made here where it is not given.
    """
    num_rows = x.shape[0] if gather is None else gather.shape[0]
    w = w.mT if trans_w else w
    num_groups, inner, width = w.shape
    columns = width // 2 if activation == "swiglu" else width
    y = x.new_empty(num_rows, columns)
    pre = x.new_empty(num_rows, width) if keep_pre else None
    if num_groups == 0:
        return y.zero_(), None if pre is None else pre.zero_()

    aligned = tables.is_aligned(x, w) and x.stride(1) == 1 and columns % 16 == 0
    mean_rows = num_rows // num_groups
    config = tables.current(x.device).select("grouped_gemm", x.dtype, activation or "none", mean_rows, columns, aligned)
    if tiles is None or tiles.numel() == 0:
        tiles = tile_map(offsets, num_rows)
    x_tma = _descriptor(x, [config.block_m, config.block_k]) if config.tma and gather is None else None
    w_trans = w.stride(2) != 1 and w.stride(1) == 1
    w_tma = None
    # Blocks of a descriptor start at 16 bytes in its last dimension, and SwiGLU's second half starts at column N.
    halves_aligned = activation != "swiglu" or w_trans or columns * w.itemsize % 16 == 0
    if config.tma and halves_aligned:
        block = [1, config.block_n, config.block_k] if w_trans else [1, config.block_k, config.block_n]
        w_tma = _descriptor(w.mT if w_trans else w, block)
    tile_count = most_tiles(num_rows, num_groups, config.block_m) * triton.cdiv(columns, config.block_n)
    launch(
        _grouped_gemm,
        persistent_grid(tile_count, config.programs_per_sm, x.device),
        x.device,
        x=x if x_tma is None else x_tma,
        w=w if w_tma is None else w_tma,
        y=y,
        pre=pre,
        gather=None if gather is None else gather.contiguous(),
        row_scale=None if row_scale is None else row_scale.contiguous(),
        tiles=section(tiles, num_rows, num_groups, config.block_m),
        N=columns,
        K=inner,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        stride_we=w.stride(0),
        stride_wk=w.stride(1),
        stride_wn=w.stride(2),
        ACTIVATION=activation or "none",
        X_TMA=x_tma is not None,
        W_TMA=w_tma is not None,
        W_TRANS=w_trans,
        PRECISION=precision(x.dtype, allow_tf32),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        **config.options(),
    )
    return y, pre


def _descriptor(t: Tensor, block: list[int]) -> Any:
    """A tensor descriptor, or None where the hardware has none for these strides: the kernel then loads by pointers."""
    *outer, last = t.stride()
    aligned = t.data_ptr() % 16 == 0 and all(s > 0 and s * t.itemsize % 16 == 0 for s in outer)
    if last != 1 or not aligned or t.numel() == 0:
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)
