"""Rows to expert order and back: gather, weighted combine, and the product that is both weights' gradient.

With plan fixed, the three are one trilinear form seen from three sides, so each is the other two's backward:

    gather   rows[n]   = scale[slot n] * x[token n]
    combine  out[t]    = sum over k of weights[t, k] * rows[row of (t, k)]
    dot      w[t, k]   = <x[t], rows[row of (t, k)]>

Rows past the last offset, those of slots without an expert, are written as zeros and never read.
Shapes: T tokens, K top-k, N = T*K rows in expert order, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import checks
from openlm_moe_kernels.plan import RoutePlan


def gather_rows(x_TD: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Tokens to expert order: row n is x[plan.tokens_N[n]], times its slot's scale if given -> (N, D). Differentiable.

    `x_TD` is float16, bfloat16, float32 or float64, `scale_TK` (T, K) of any float dtype. Rows of slots without an
    expert are zero. Raises ValueError naming the argument whose shape, dtype or device is wrong.
    """
    checks.matrix("x", x_TD, 2)
    checks.plan(plan, "x", x_TD, tokens=x_TD.shape[0])
    _check_weights("scale", scale_TK, plan, x_TD)
    checks.backend(backend)
    return _gather(x_TD, scale_TK, plan.tensors(), plan.top_k, backend)


def combine_topk(y_ND: Tensor, weights_TK: Tensor | None, plan: RoutePlan, *, backend: str = "auto") -> Tensor:
    """Expert order to tokens: out[t] = sum over k of weights[t, k] * y[row of (t, k)] -> (T, D). Differentiable.

    `y_ND` is float16, bfloat16, float32 or float64 and the result has its dtype; `weights_TK` (T, K) is of any float
    dtype, None means ones. Each token reads its k rows and sums them in float32 (float64), without atomics. Slots
    without an expert contribute nothing. Raises ValueError naming the argument whose shape, dtype or device is wrong.
    """
    checks.matrix("y", y_ND, 2)
    checks.plan(plan, "y", y_ND, rows=y_ND.shape[0])
    _check_weights("weights", weights_TK, plan, y_ND)
    checks.backend(backend)
    return _combine(y_ND, weights_TK, plan.tensors(), plan.top_k, backend)


def _check_weights(name: str, weights_TK: Tensor | None, plan: RoutePlan, x: Tensor) -> None:
    if weights_TK is not None:
        checks.matrix(name, weights_TK, 2)
        checks.shape(name, weights_TK, (plan.num_tokens, plan.top_k), "(T, K)")
        checks.on_device(name, weights_TK, "x", x)


@torch.library.custom_op("openlm_moe::gather_rows", mutates_args=())
def _gather(x: Tensor, scale: Tensor | None, plan: list[Tensor], top_k: int, backend: str) -> Tensor:
    return backends.run(backend, x).gather_rows(x, RoutePlan(*plan, top_k), scale)


@torch.library.custom_op("openlm_moe::combine_topk", mutates_args=())
def _combine(y: Tensor, weights: Tensor | None, plan: list[Tensor], top_k: int, backend: str) -> Tensor:
    return backends.run(backend, y).combine_topk(y, weights, RoutePlan(*plan, top_k))


@torch.library.custom_op("openlm_moe::combine_topk_dweights", mutates_args=())
def _dot(x: Tensor, y: Tensor, plan: list[Tensor], top_k: int, backend: str) -> Tensor:
    return backends.run(backend, x).combine_topk_dweights(x, y, RoutePlan(*plan, top_k))


@_gather.register_fake
def _(x, scale, plan, top_k, backend):
    return x.new_empty(x.shape[0] * top_k, x.shape[1])


@_combine.register_fake
def _(y, weights, plan, top_k, backend):
    return y.new_empty(y.shape[0] // top_k, y.shape[1])


@_dot.register_fake
def _(x, y, plan, top_k, backend):
    return x.new_empty(x.shape[0], top_k, dtype=torch.promote_types(x.dtype, torch.float32))


def _setup(ctx, inputs, output):
    first, second, plan, *ctx.settings = inputs
    # The rows are needed for the gradient of the weights alone: without weights nothing of size N x D is kept.
    ctx.save_for_backward(None if second is None else first, second, *plan)


def _grads(ctx, first, second, plan):
    """Computes the two gradients that are asked for; the plan and the settings have none."""
    need_first, need_second, *_ = ctx.needs_input_grad
    return first() if need_first else None, second() if need_second else None, [None] * len(plan), None, None


def _gather_backward(ctx, drows):
    x, scale, *plan = ctx.saved_tensors
    return _grads(
        ctx,
        lambda: _combine(drows, scale, plan, *ctx.settings),
        lambda: _dot(x, drows, plan, *ctx.settings).to(scale.dtype),
        plan,
    )


def _combine_backward(ctx, dout):
    y, weights, *plan = ctx.saved_tensors
    return _grads(
        ctx,
        lambda: _gather(dout, weights, plan, *ctx.settings),
        lambda: _dot(dout, y, plan, *ctx.settings).to(weights.dtype),
        plan,
    )


def _dot_backward(ctx, dw):
    x, y, *plan = ctx.saved_tensors
    return _grads(
        ctx,
        lambda: _combine(y, dw, plan, *ctx.settings),
        lambda: _gather(x, dw, plan, *ctx.settings),
        plan,
    )


_gather.register_autograd(_gather_backward, setup_context=_setup)
_combine.register_autograd(_combine_backward, setup_context=_setup)
_dot.register_autograd(_dot_backward, setup_context=_setup)
