"""The experts' feed-forward as one differentiable function: gather, GEMM, activation, GEMM, scale, sum over k.

Shape letters: T tokens, K top-k, N = T*K routed rows in expert order, D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels.plan import RoutePlan


def expert_ffn(
    x_TD: Tensor,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutePlan,
    *,
    activation: str = "gelu",
    backend: str = "auto",
    allow_tf32: bool = False,
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * act(x[t] w1_e) w2_e, where e is the expert of slot (t, k) -> (T, D)."""
    name = backends.select(backend, x_TD.device, x_TD.dtype)
    keep_pre = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w1, w2))
    out_TD, _ = _expert_ffn(
        x_TD, weights_TK, w1, w2, plan.tensors(), plan.top_k, activation, name, keep_pre, allow_tf32
    )
    return out_TD


@torch.library.custom_op("openlm_moe::expert_ffn", mutates_args=())
def _expert_ffn(
    x: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: list[Tensor],
    top_k: int,
    activation: str,
    backend: str,
    keep_pre: bool,
    allow_tf32: bool,
) -> tuple[Tensor, Tensor]:
    return backends.load(backend).ffn_forward(
        x, weights, w1, w2, RoutePlan(*plan, top_k), activation, keep_pre=keep_pre, allow_tf32=allow_tf32
    )


@_expert_ffn.register_fake
def _(x, weights, w1, w2, plan, top_k, activation, backend, keep_pre, allow_tf32):
    pre = x.new_empty(plan[2].shape[0], w1.shape[2]) if keep_pre else x.new_empty(0, 0)
    return x.new_empty(x.shape), pre


@torch.library.custom_op("openlm_moe::expert_ffn_backward", mutates_args=())
def _expert_ffn_backward(
    dout: Tensor,
    x: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    pre: Tensor,
    plan: list[Tensor],
    top_k: int,
    activation: str,
    backend: str,
    needs: list[bool],
    allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backends.load(backend).ffn_backward(
        dout, x, weights, w1, w2, pre, RoutePlan(*plan, top_k), activation, tuple(needs), allow_tf32=allow_tf32
    )


@_expert_ffn_backward.register_fake
def _(dout, x, weights, w1, w2, pre, plan, top_k, activation, backend, needs, allow_tf32):
    return tuple(
        t.new_empty(t.shape if need else 0) for t, need in zip((x, weights, w1, w2), needs, strict=True)
    )


def _setup(ctx, inputs, output):
    x, weights, w1, w2, plan, *ctx.settings, keep_pre, ctx.allow_tf32 = inputs
    _, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, w1, w2, pre, *plan)


def _backward(ctx, dout, _):
    x, weights, w1, w2, pre, *plan = ctx.saved_tensors
    if dout is None:
        return None, None, None, None, [None] * len(plan), None, None, None, None, None
    needs = list(ctx.needs_input_grad[:4])
    grads = _expert_ffn_backward(dout, x, weights, w1, w2, pre, plan, *ctx.settings, needs, ctx.allow_tf32)
    kept = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *kept, [None] * len(plan), None, None, None, None, None


_expert_ffn.register_autograd(_backward, setup_context=_setup)
