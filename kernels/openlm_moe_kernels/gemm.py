"""Grouped GEMMs: one product a group of rows, each group with its own weight, no padding and no dropped row.

Shapes: M rows in E groups, K and N the product's inner and outer size. `offsets (E,)` int32 are cumulative ends: group
e is rows [offsets[e-1], offsets[e]), as in torch.nn.functional.grouped_mm. Unlike there, rows past the last offset are
exact zeros in outputs and in input gradients, and an empty group's weight gradient is exactly zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import checks
from openlm_moe_kernels.activation import activation_backward_op


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
    backend: str = "auto",
) -> Tensor:
    """y[m] = row_scale[m] * act(x[m] w_e), where e is the group of row m -> (M, N), in the dtype of x. Differentiable.

    Args:
        x: (M, K), or (any, K) with `gather`. float16, bfloat16, float32 or float64; sums in float32 (float64).
        w: (E, K, N), or (E, N, K) with `trans_w`; the dtype of x. With "swiglu" it has 2N columns, gate half first.
        offsets: (E,) int32 cumulative ends, E at least 1, non-decreasing, the last at most M.
        gather: (M,) int64: row m reads x[gather[m]], loaded in place.
        activation: None, "gelu" (tanh approximation) or "swiglu" (silu(gate) * up), applied before anything is stored.
        row_scale: (M,), any float dtype, multiplied after the activation.
        allow_tf32: lets float32 products round their inputs to TF32; otherwise they are IEEE.
        backend: "auto", "triton", "torch" or "reference".

    Backward computes the product again if there is an activation or a row scale, instead of keeping it; such a
    product is differentiable once only.
    Raises ValueError naming the argument whose shape, dtype, device or (where read) value is wrong.
    """
    checks.matrix("x", x, 2)
    checks.matrix("w", w, 3)
    checks.like("w", w, "x", x)
    inner = w.shape[2] if trans_w else w.shape[1]
    outer = w.shape[1] if trans_w else w.shape[2]
    checks.require(inner == x.shape[1], "w", lambda: f"has shape {tuple(w.shape)}, but x has {x.shape[1]} columns")
    checks.offsets(offsets, w.shape[0], "x", x)
    checks.gather(gather, x)
    checks.activation(activation)
    checks.require(
        activation != "swiglu" or outer % 2 == 0, "w", lambda: f"has {outer} columns; swiglu needs an even number"
    )
    if row_scale is not None:
        checks.per_row("row_scale", row_scale, _rows(x, gather), "x", x)
    checks.backend(backend)
    return _grouped_gemm(x, w, offsets, gather, row_scale, trans_w, activation, backend, allow_tf32)


def grouped_gemm_dgrad(
    dy: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    trans_w: bool = False,
    allow_tf32: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The input gradient of `grouped_gemm(x, w, offsets, trans_w=trans_w)`: dx[m] = dy[m] w_e^T -> (M, K).

    `dy` is (M, N); everything else, errors included, as in `grouped_gemm`. Rows past the last offset are zero.
    Differentiable, for it is a grouped GEMM itself.
    """
    checks.matrix("dy", dy, 2)
    checks.matrix("w", w, 3)
    outer = w.shape[1] if trans_w else w.shape[2]
    checks.require(outer == dy.shape[1], "w", lambda: f"has shape {tuple(w.shape)}, but dy has {dy.shape[1]} columns")
    return grouped_gemm(dy, w, offsets, trans_w=not trans_w, allow_tf32=allow_tf32, backend=backend)


def grouped_gemm_wgrad(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    *,
    trans_w: bool = False,
    gather: Tensor | None = None,
    out: Tensor | None = None,
    allow_tf32: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The weight gradient: dw[e] = x_e^T dy_e -> (E, K, N), or (E, N, K) with `trans_w`. The rows are the inner size.

    Args:
        x: (M, K), or (any, K) with `gather` (M,) int64.
        dy: (M, N), the dtype of x.
        offsets: (E,) int32 cumulative ends.
        out: a gradient buffer of the result's shape, in the dtype of x or float32. The gradient is added to it in place
            and it is returned. Without it the result is new, in the dtype of x, and the function is differentiable.

    An empty group's gradient is exactly zero, and rows past the last offset are not read. Raises ValueError as
    `grouped_gemm` does.
    """
    checks.matrix("x", x, 2)
    checks.matrix("dy", dy, 2)
    checks.like("dy", dy, "x", x)
    checks.gather(gather, x)
    rows = _rows(x, gather)
    checks.require(dy.shape[0] == rows, "dy", lambda: f"has {dy.shape[0]} rows; expected {rows}")
    checks.offsets(offsets, None, "x", x)
    checks.backend(backend)
    if out is None:
        return _wgrad(x, dy, offsets, gather, trans_w, backend, allow_tf32)
    checks.matrix("out", out, 3)
    checks.shape("out", out, _wgrad_shape(x, dy, offsets, trans_w), "(E, N, K)" if trans_w else "(E, K, N)")
    allowed = dict.fromkeys((x.dtype, torch.float32))
    checks.require(
        out.dtype in allowed, "out", lambda: f"has dtype {out.dtype}; expected {' or '.join(map(str, allowed))}"
    )
    checks.on_device("out", out, "x", x)
    checks.require(
        not (out.requires_grad and torch.is_grad_enabled()), "out", lambda: "requires grad; give a gradient buffer"
    )
    checks.require(
        all(step > 0 or size == 1 for step, size in zip(out.stride(), out.shape, strict=True)),
        "out",
        lambda: f"has strides {out.stride()}, so that elements share memory; give a buffer of its own",
    )
    _wgrad_into(x, dy, offsets, gather, out, trans_w, backend, allow_tf32)
    return out


def _rows(x: Tensor, gather: Tensor | None) -> int:
    return x.shape[0] if gather is None else gather.shape[0]


def _wgrad_shape(x: Tensor, dy: Tensor, offsets: Tensor, trans_w: bool) -> tuple[int, int, int]:
    inner = (dy.shape[1], x.shape[1]) if trans_w else (x.shape[1], dy.shape[1])
    return offsets.shape[0], *inner


def _check_values(x: Tensor, offsets: Tensor, gather: Tensor | None) -> None:
    checks.offset_values(offsets, _rows(x, gather))
    checks.index_values("gather", gather, x.shape[0])


def _scatter_rows(rows: Tensor, gather: Tensor | None, like: Tensor) -> Tensor:
    """Backward of a gather by any index: sums the rows that read the same source row, in the accumulation dtype."""
    if gather is None:
        return rows
    sums = rows.new_zeros(like.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
    # index_put sorts on a GPU, where index_add's atomics would make the sum depend on timing.
    return torch.index_put(sums, (gather,), rows.to(sums.dtype), accumulate=True).to(rows.dtype)


@torch.library.custom_op("openlm_moe::grouped_gemm", mutates_args=())
def _grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    gather: Tensor | None,
    row_scale: Tensor | None,
    trans_w: bool,
    activation: str | None,
    backend: str,
    allow_tf32: bool,
) -> Tensor:
    _check_values(x, offsets, gather)
    return backends.run(backend, x).grouped_gemm(
        x,
        w,
        offsets,
        trans_w=trans_w,
        gather=gather,
        activation=activation,
        row_scale=row_scale,
        allow_tf32=allow_tf32,
    )


@_grouped_gemm.register_fake
def _(x, w, offsets, gather, row_scale, trans_w, activation, backend, allow_tf32):
    columns = w.shape[1] if trans_w else w.shape[2]
    return x.new_empty(_rows(x, gather), columns // 2 if activation == "swiglu" else columns)


def _setup(ctx, inputs, output):
    *tensors, ctx.trans_w, ctx.activation, ctx.backend, ctx.allow_tf32 = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    x, w, offsets, gather, row_scale = ctx.saved_tensors
    need_x, need_w, _, _, need_scale, *_ = ctx.needs_input_grad
    how = ctx.backend, ctx.allow_tf32
    dx = dw = dscale = None
    if ctx.activation is not None or row_scale is not None:
        pre = _grouped_gemm(x, w, offsets, gather, None, ctx.trans_w, None, *how)
        dy, _, dscale = activation_backward_op(pre, dy, offsets, row_scale, ctx.activation, ctx.backend)
    if need_x:
        dx = _scatter_rows(_grouped_gemm(dy, w, offsets, None, None, not ctx.trans_w, None, *how), gather, x)
    if need_w:
        dw = _wgrad(x, dy, offsets, gather, ctx.trans_w, *how)
    return dx, dw, None, None, dscale.to(row_scale.dtype) if need_scale else None, None, None, None, None


_grouped_gemm.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("openlm_moe::grouped_gemm_wgrad", mutates_args=())
def _wgrad(
    x: Tensor, dy: Tensor, offsets: Tensor, gather: Tensor | None, trans_w: bool, backend: str, allow_tf32: bool
) -> Tensor:
    _check_values(x, offsets, gather)
    return backends.run(backend, x).grouped_gemm_wgrad(
        x, dy, offsets, trans_w=trans_w, gather=gather, allow_tf32=allow_tf32
    )


@_wgrad.register_fake
def _(x, dy, offsets, gather, trans_w, backend, allow_tf32):
    return x.new_empty(_wgrad_shape(x, dy, offsets, trans_w))


def _wgrad_setup(ctx, inputs, output):
    x, dy, offsets, gather, ctx.trans_w, ctx.backend, ctx.allow_tf32 = inputs
    ctx.save_for_backward(x, dy, offsets, gather)


def _wgrad_backward(ctx, ddw):
    x, dy, offsets, gather = ctx.saved_tensors
    how = ctx.backend, ctx.allow_tf32
    dx = ddy = None
    if ctx.needs_input_grad[0]:
        dx = _scatter_rows(_grouped_gemm(dy, ddw, offsets, None, None, not ctx.trans_w, None, *how), gather, x)
    if ctx.needs_input_grad[1]:
        ddy = _grouped_gemm(x, ddw, offsets, gather, None, ctx.trans_w, None, *how)
    return dx, ddy, None, None, None, None, None


_wgrad.register_autograd(_wgrad_backward, setup_context=_wgrad_setup)


@torch.library.custom_op("openlm_moe::grouped_gemm_wgrad_into", mutates_args=("out",))
def _wgrad_into(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    gather: Tensor | None,
    out: Tensor,
    trans_w: bool,
    backend: str,
    allow_tf32: bool,
) -> None:
    _check_values(x, offsets, gather)
    backends.run(backend, x).grouped_gemm_wgrad(
        x, dy, offsets, trans_w=trans_w, gather=gather, out=out, allow_tf32=allow_tf32
    )


@_wgrad_into.register_fake
def _(x, dy, offsets, gather, out, trans_w, backend, allow_tf32):
    return None
