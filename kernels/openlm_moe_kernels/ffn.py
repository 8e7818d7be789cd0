"""The experts' feed-forward as one differentiable function: gather, GEMM, activation, GEMM, scale, sum over k.

Shape letters: T tokens, K top-k, N = T*K routed rows in expert order, D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import checks
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
    """out[t] = sum over k of weights[t, k] * act(x[t] w1_e) w2_e, where e is the expert of slot (t, k) -> (T, D).

    Args:
        x_TD: (T, D), float16, bfloat16, float32 or float64; the result has its dtype, sums are float32 (float64).
        weights_TK: (T, K) combine weights, any float dtype, float32 as a rule; their gradient comes in their dtype.
        w1: (E, D, F), for "swiglu" (E, D, 2F) with the gate half first; the dtype of x.
        w2: (E, F, D), the dtype of x.
        plan: `route_plan(expert_ids_TK, E)`. Slots without an expert contribute nothing and get zero gradients.
        activation: "gelu" (tanh approximation) or "swiglu" (silu(gate) * up).
        backend: "auto", "triton", "torch" or "reference".
        allow_tf32: lets float32 products round their inputs to TF32; otherwise they are IEEE.

    Saved for backward: x, the weights, w1, w2, the pre-activation (N, F) or (N, 2F), and the plan. Nothing of size
    N x D is kept: backward gathers the rows again and gets the combine weights' gradient as <dA, A> (SonicMoE,
    arXiv 2512.14080). An expert without rows has exactly zero gradients. Differentiable once. Raises ValueError naming
    the argument whose shape, dtype or device is wrong, and where a backend that is asked for by name cannot run.
    """
    checks.matrix("x", x_TD, 2)
    checks.matrix("w1", w1, 3)
    checks.matrix("w2", w2, 3)
    checks.like("w1", w1, "x", x_TD)
    checks.like("w2", w2, "x", x_TD)
    checks.activation(activation, backends.ACTIVATIONS)
    (n_tokens, dim), (n_experts, hidden) = x_TD.shape, w2.shape[:2]
    width = hidden * (2 if activation == "swiglu" else 1)
    checks.shape("w2", w2, (n_experts, hidden, dim), "(E, F, D)")
    checks.shape("w1", w1, (n_experts, dim, width), "(E, D, 2F)" if activation == "swiglu" else "(E, D, F)")
    checks.plan(plan, "x", x_TD, tokens=n_tokens)
    checks.require(
        plan.num_experts == n_experts, "plan", lambda: f"has {plan.num_experts} experts, but w2 has {n_experts}"
    )
    checks.matrix("weights", weights_TK, 2)
    checks.shape("weights", weights_TK, (n_tokens, plan.top_k), "(T, K)")
    checks.on_device("weights", weights_TK, "x", x_TD)
    checks.backend(backend)
    keep_pre = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w1, w2))
    out_TD, _ = _forward(
        x_TD, weights_TK, w1, w2, plan.tensors(), plan.top_k, activation, backend, allow_tf32, keep_pre
    )
    return out_TD


@torch.library.custom_op("openlm_moe::expert_ffn", mutates_args=())
def _forward(
    x: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: list[Tensor],
    top_k: int,
    activation: str,
    backend: str,
    allow_tf32: bool,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    return backends.run(backend, x).ffn_forward(
        x, weights, w1, w2, RoutePlan(*plan, top_k), activation, keep_pre=keep_pre, allow_tf32=allow_tf32
    )


@_forward.register_fake
def _(x, weights, w1, w2, plan, top_k, activation, backend, allow_tf32, keep_pre):
    pre = x.new_empty(x.shape[0] * top_k, w1.shape[2]) if keep_pre else x.new_empty(0, 0)
    return x.new_empty(x.shape), pre


def _setup(ctx, inputs, output):
    x, weights, w1, w2, plan, *settings, _ = inputs
    _, pre = output
    ctx.settings = settings
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, w1, w2, pre, *plan)


def _backward(ctx, dout, _):
    x, weights, w1, w2, pre, *plan = ctx.saved_tensors
    grads = [None] * 4
    if dout is not None:
        needs = list(ctx.needs_input_grad[:4])
        computed = _gradients(dout, x, weights, w1, w2, pre, plan, *ctx.settings, needs)
        grads = [grad if need else None for grad, need in zip(computed, needs, strict=True)]
    return *grads, [None] * len(plan), None, None, None, None, None


_forward.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("openlm_moe::expert_ffn_backward", mutates_args=())
def _gradients(
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
    allow_tf32: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = backends.run(backend, x).ffn_backward(
        dout, x, weights, w1, w2, pre, RoutePlan(*plan, top_k), activation, tuple(needs), allow_tf32=allow_tf32
    )
    # An operator may not return one placeholder twice, as with two frozen weights.
    return tuple(grad if need else x.new_empty(0) for grad, need in zip(grads, needs, strict=True))


@_gradients.register_fake
def _(dout, x, weights, w1, w2, pre, plan, top_k, activation, backend, allow_tf32, needs):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip((x, weights, w1, w2), needs, strict=True))
