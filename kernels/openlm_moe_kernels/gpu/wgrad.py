"""The weight gradient of a grouped GEMM: for every group the transposed rows of one operand times those of the other.

Shape letters: M rows (summed over, ragged), K and N columns of the two operands, E groups; BLOCK_* are tile sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.grouped_gemm import tile_position
from openlm_moe_kernels.gpu.launch import launch, persistent_grid, precision


@triton.jit
def _wgrad(
    x,
    dy,
    dw,
    gather_x,
    gather_dy,
    offsets,
    num_groups,
    K,
    N,
    stride_xm,
    stride_xk,
    stride_ym,
    stride_yn,
    stride_we,
    stride_wk,
    stride_wn,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.cdiv(K, BLOCK_K)
    column_tiles = tl.cdiv(N, BLOCK_N)
    per_group = row_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), num_groups * per_group, tl.num_programs(0)):
        group = tile // per_group
        row_tile, column_tile = tile_position(tile % per_group, row_tiles, column_tiles, GROUP)
        start = tl.load(offsets + group - 1, mask=group > 0, other=0)
        end = tl.load(offsets + group)
        ks = (row_tile * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        ns = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        k_mask = ks < K
        n_mask = ns < N
        # x is loaded transposed: `a.T` of a tile loaded straight costs a pass through shared memory.
        x_block = x + ks[:, None] * stride_xk
        dy_block = dy + ns[None, :] * stride_yn

        out = dw + group.to(tl.int64) * stride_we + ks[:, None] * stride_wk + ns[None, :] * stride_wn
        mask = k_mask[:, None] & n_mask[None, :]
        acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        if ACCUMULATE:
            acc = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        for m in tl.range(start, end, BLOCK_M):
            rows = (m + tl.arange(0, BLOCK_M)).to(tl.int64)
            # Both operands are masked: what follows the group may be NaN, and 0 * NaN is NaN.
            row_mask = rows < end
            x_rows = rows
            if gather_x is not None:
                x_rows = tl.load(gather_x + rows, mask=row_mask, other=0)
            dy_rows = rows
            if gather_dy is not None:
                dy_rows = tl.load(gather_dy + rows, mask=row_mask, other=0)
            a = tl.load(x_block + x_rows[None, :] * stride_xm, mask=row_mask[None, :] & k_mask[:, None], other=0.0)
            b = tl.load(dy_block + dy_rows[:, None] * stride_ym, mask=row_mask[:, None] & n_mask[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        tl.store(out, acc.to(dw.dtype.element_ty), mask=mask)


def wgrad(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    *,
    gather_x: Tensor | None = None,
    gather_dy: Tensor | None = None,
    out: Tensor | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    """x (M, K), dy (M, N), either gathered -> x_e^T dy_e (E, K, N), zero for empty groups; added to `out` if given."""
    num_rows = (x if gather_x is None else gather_x).shape[0]
    num_groups, inner, columns = offsets.shape[0], x.shape[1], dy.shape[1]
    dw = x.new_empty(num_groups, inner, columns) if out is None else out
    if dw.numel() == 0:
        return dw
    aligned = tables.is_aligned(x, dy, dw) and x.stride(1) == dy.stride(1) == 1
    config = tables.current(x.device).select(
        "wgrad", x.dtype, "store" if out is None else "add", num_rows // num_groups, columns, aligned
    )
    tile_count = num_groups * triton.cdiv(inner, config.block_k) * triton.cdiv(columns, config.block_n)
    launch(
        _wgrad,
        persistent_grid(tile_count, config.programs_per_sm, x.device),
        x.device,
        x=x,
        dy=dy,
        dw=dw,
        gather_x=None if gather_x is None else gather_x.contiguous(),
        gather_dy=None if gather_dy is None else gather_dy.contiguous(),
        offsets=offsets,
        num_groups=num_groups,
        K=inner,
        N=columns,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        stride_ym=dy.stride(0),
        stride_yn=dy.stride(1),
        stride_we=dw.stride(0),
        stride_wk=dw.stride(1),
        stride_wn=dw.stride(2),
        ACCUMULATE=out is not None,
        PRECISION=precision(x.dtype, allow_tf32),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        **config.options(),
    )
    return dw
