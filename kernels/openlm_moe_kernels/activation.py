"""Backward of the experts' activation, fused with the scaling of rows and with the gradient of the combine weights.

Shapes: N rows in expert order, F expert hidden dim, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import checks


def activation_backward(
    pre: Tensor,
    da: Tensor,
    offsets: Tensor,
    *,
    activation: str | None,
    row_scale: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of a = row_scale * act(pre), in one pass: (dpre, a, dscale).

    Args:
        pre: (N, F), for "swiglu" (N, 2F) with the gate half first.
        da: (N, F), the dtype of pre.
        offsets: (E,) int32 cumulative ends; rows past the last are zero in all three results and are not read.
        activation: "gelu" (tanh approximation), "swiglu", or None for the identity.
        row_scale: (N,), any float dtype; None means ones.

    Returns:
        dpre, like pre: act'(pre) * row_scale * da.
        a, like da: what the second GEMM's weight gradient multiplies, made again here instead of being kept.
        dscale (N,), float32 (float64 for float64): <da, act(pre)>. With da = dout w2^T it is the gradient of the
            combine weight, so the second GEMM's output is never needed (SonicMoE, arXiv 2512.14080).

    Not differentiable. Raises ValueError naming the argument whose shape, dtype, device or value is wrong.
    """
    checks.matrix("pre", pre, 2)
    checks.matrix("da", da, 2)
    checks.like("da", da, "pre", pre)
    checks.activation(activation)
    columns = da.shape[1] * (2 if activation == "swiglu" else 1)
    checks.shape("pre", pre, (da.shape[0], columns), "(N, 2F)" if activation == "swiglu" else "(N, F)")
    checks.offsets(offsets, None, "pre", pre)
    if row_scale is not None:
        checks.per_row("row_scale", row_scale, pre.shape[0], "pre", pre)
    checks.backend(backend)
    return activation_backward_op(pre, da, offsets, row_scale, activation, backend)


@torch.library.custom_op("openlm_moe::activation_backward", mutates_args=())
def activation_backward_op(
    pre: Tensor, da: Tensor, offsets: Tensor, row_scale: Tensor | None, activation: str | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    checks.offset_values(offsets, pre.shape[0])
    return backends.run(backend, pre).act_backward(pre, da, offsets, activation, row_scale)


@activation_backward_op.register_fake
def _(pre, da, offsets, row_scale, activation, backend):
    accumulation = torch.promote_types(pre.dtype, torch.float32)
    return pre.new_empty(pre.shape), da.new_empty(da.shape), pre.new_empty(pre.shape[0], dtype=accumulation)
