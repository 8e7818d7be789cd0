"""The expert feed-forward composed from a backend's own operations, for backends that have no fused one.

Shapes as in `ffn.py`. Backward after SonicMoE (arXiv 2512.14080): the activation is made again from the pre-activation,
and the combine weights' gradient is <dA, A>, so the second product's output is not needed again.
"""

from __future__ import annotations

from torch import Tensor

from openlm_moe_kernels.backend import Backend
from openlm_moe_kernels.formulas import activate
from openlm_moe_kernels.plan import RoutePlan


def ffn_forward(
    ops: Backend,
    x: Tensor,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutePlan,
    activation: str,
    keep_pre: bool,
    allow_tf32: bool,
) -> tuple[Tensor, Tensor]:
    pre = ops.grouped_gemm(x, w1, plan.offsets_E, gather=plan.tokens_N, allow_tf32=allow_tf32)
    y_ND = ops.grouped_gemm(activate(pre, activation), w2, plan.offsets_E, allow_tf32=allow_tf32)
    return ops.combine_topk(y_ND, weights_TK, plan), pre if keep_pre else pre.new_empty(0, 0)


def ffn_backward(
    ops: Backend,
    dout: Tensor,
    x: Tensor,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    pre: Tensor,
    plan: RoutePlan,
    activation: str,
    needs: tuple[bool, bool, bool, bool],
    allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    offsets = plan.offsets_E
    need_x, need_weights, need_w1, need_w2 = needs
    g_ND = ops.gather_rows(dout, plan)
    da_NF = ops.grouped_gemm(g_ND, w2, offsets, trans_w=True, allow_tf32=allow_tf32)
    scale_N = weights_TK.reshape(-1)[plan.order_N]
    dpre, act_NF, dscale_N = ops.act_backward(pre, da_NF, offsets, activation, scale_N)
    dx = dweights = dw1 = dw2 = x.new_empty(0)
    if need_x:
        dx_ND = ops.grouped_gemm(dpre, w1, offsets, trans_w=True, allow_tf32=allow_tf32)
        dx = ops.combine_topk(dx_ND, None, plan)
    if need_weights:
        dweights = dscale_N[plan.inverse_N].view(weights_TK.shape).to(weights_TK.dtype)
    if need_w1:
        dw1 = ops.grouped_gemm_wgrad(x, dpre, offsets, gather=plan.tokens_N, allow_tf32=allow_tf32)
    if need_w2:
        dw2 = ops.grouped_gemm_wgrad(act_NF, g_ND, offsets, allow_tf32=allow_tf32)
    return dx, dweights, dw1, dw2
