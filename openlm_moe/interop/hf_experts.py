"""Our grouped GEMMs as an experts implementation of transformers 5: `experts_implementation="openlm_moe"`.

One registration serves every model file of transformers that uses its experts interface (Mixtral, Qwen MoE, OLMoE,
DeepSeek, GPT-OSS, ...), forward and backward.

Shapes: T tokens, D model dim, F expert hidden dim, E experts, K top-k, N = T*K routed rows.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from openlm_moe.errors import UserError
from openlm_moe.interop.hf_patch import patch
from openlm_moe_kernels import RoutePlan, combine_topk, expert_ffn, gather_rows, grouped_gemm, route_plan

__all__ = ["NAME", "experts_forward", "patch", "register"]

NAME = "openlm_moe"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def register() -> str:
    """Registers the implementation and returns its name, for `from_pretrained(..., experts_implementation=name)`.

    Call it before the model is built or before `model.set_experts_implementation(name)`. Raises `UserError` when
    transformers is missing or older than 5.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        raise UserError(
            'transformers 5 is not installed; pip install "openlm-moe[hf]", or for 4.x use '
            "openlm_moe.interop.hf_experts.patch(model)"
        ) from None
    ExpertsInterface.register(NAME, experts_forward)
    return NAME


def experts_forward(self: nn.Module, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """transformers' contract for an experts module: (T, D), ids (T, K), weights (T, K) -> (T, D).

    Ids of `num_experts` and above are sentinels of its expert parallelism: they contribute nothing. A module that
    cannot be served runs its own implementation, with one warning for its class that says why.
    """
    if reason := why_not(self):
        _warn_once(type(self).__name__, reason)
        return type(self).forward.__wrapped__(self, x_TD, ids_TK, weights_TK)
    device = x_TD.device.type
    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    w_up, w_down = getattr(self, up_name), self.down_proj
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w_up.dtype
    with torch.autocast(device, enabled=False):
        plan = route_plan(ids_TK, self.num_experts)
        run = _fused if fused_activation(self) else _composed
        out_TD = run(self, x_TD.to(dtype), weights_TK, w_up.to(dtype), w_down.to(dtype), plan, ids_TK)
    return out_TD.to(x_TD.dtype)


def why_not(experts: nn.Module) -> str | None:
    """Why this experts module cannot run on our kernels; None where it can."""
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    for name in (up_name, "down_proj"):
        weight = getattr(experts, name, None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"it has no stacked weight {name}"
        if weight.dtype not in DTYPES:
            return f"{name} is stored as {weight.dtype}"
    return None


def fused_activation(experts: nn.Module) -> str | None:
    """The activation under which the whole FFN is one fused function; None where it must be composed of parts."""
    if experts.has_bias or experts.has_post_expert_norm:
        return None
    kind = type(experts.act_fn).__name__ if hasattr(experts, "act_fn") else ""
    if experts.has_gate:
        from transformers.integrations.moe import _default_apply_gate

        plain = type(experts)._apply_gate is _default_apply_gate and experts.is_concatenated
        return "swiglu" if plain and kind in ("SiLUActivation", "SiLU") else None
    return "gelu" if kind in ("GELUTanh", "NewGELUActivation") else None


def _fused(
    experts: nn.Module, x_TD: Tensor, weights_TK: Tensor, w_up: Tensor, w_down: Tensor, plan: RoutePlan, ids_TK: Tensor
) -> Tensor:
    if not experts.is_transposed:  # stored as (E, out, in)
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    return expert_ffn(x_TD, weights_TK, w_up, w_down, plan, activation=fused_activation(experts))


def _composed(
    experts: nn.Module, x_TD: Tensor, weights_TK: Tensor, w_up: Tensor, w_down: Tensor, plan: RoutePlan, ids_TK: Tensor
) -> Tensor:
    trans_w = not experts.is_transposed
    # Rows without an expert come last; they take the last expert's bias, and the combine skips them.
    expert_of_row_N = ids_TK.flatten()[plan.order_N].clamp(max=experts.num_experts - 1)

    def bias(name: str) -> Tensor | float:
        return getattr(experts, name).to(x_TD.dtype)[expert_of_row_N] if experts.has_bias else 0.0

    hidden = grouped_gemm(gather_rows(x_TD, plan), w_up, plan.offsets_E, trans_w=trans_w)
    if experts.has_gate:
        hidden = experts._apply_gate(hidden + bias("gate_up_proj_bias"))
    else:
        hidden = experts.act_fn(hidden + bias("up_proj_bias"))
    y_ND = grouped_gemm(hidden, w_down, plan.offsets_E, trans_w=trans_w) + bias("down_proj_bias")
    if experts.has_post_expert_norm:
        y_ND = experts.post_expert_norm(y_ND)
    return combine_topk(y_ND, weights_TK, plan)


_warned: set[str] = set()


def _warn_once(family: str, reason: str) -> None:
    if family not in _warned:
        _warned.add(family)
        warnings.warn(f"{family} runs its own experts implementation, not openlm_moe's: {reason}", stacklevel=3)
