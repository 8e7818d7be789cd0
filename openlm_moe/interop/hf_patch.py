"""Our experts in Mixtral-style blocks of transformers 4, which keeps each expert as a module of its own.

Shapes: T tokens, D model dim, F expert hidden dim, E experts, K top-k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe.errors import UserError
from openlm_moe_kernels import expert_ffn, route_plan

# Blocks of one linear router and E SwiGLU experts: softmax over E, top-k, and nothing beside them.
BLOCKS = ("MixtralSparseMoeBlock", "OlmoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
# Names of an expert's gate, up and down projections, Mixtral's and everybody else's.
EXPERT_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class StackedMoeBlock(nn.Module):
    """Takes the place of a Mixtral-style block: its router, and its experts stacked."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        names = next((n for n in EXPERT_NAMES if hasattr(block.experts[0], n[0])), None)
        if names is None:
            raise UserError(f"the experts of {type(block).__name__} have none of the known weight names")
        if getattr(block, "jitter_noise", 0.0):
            raise UserError(
                f"router_jitter_noise is {block.jitter_noise}: transformers 4 lets that noise reach the experts, which "
                "ours never do; set it to 0"
            )
        gate, up, down = ([getattr(expert, name).weight.detach() for expert in block.experts] for name in names)
        self.gate = block.gate
        self.top_k = block.top_k
        self.normalize = getattr(block, "norm_topk_prob", True)  # Mixtral always does
        # (E, D, 2F) and (E, F, D), as our kernels take them
        self.w1 = nn.Parameter(torch.cat([torch.stack(gate), torch.stack(up)], dim=1).transpose(1, 2).contiguous())
        self.w2 = nn.Parameter(torch.stack(down).transpose(1, 2).contiguous())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> the same, and the router's logits (T, E)."""
        x_TD = hidden_states.flatten(0, 1)
        logits_TE = self.gate(x_TD)
        weights_TK, ids_TK = F.softmax(logits_TE, dim=1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        plan = route_plan(ids_TK, self.w1.shape[0])
        out_TD = expert_ffn(x_TD, weights_TK, self.w1, self.w2, plan, activation="swiglu")
        return out_TD.view_as(hidden_states), logits_TE


def patch(model: nn.Module) -> int:
    """Swaps every Mixtral-style block of `model`, in place, for one on our kernels; returns how many.

    The experts' weights move into stacked parameters `w1` and `w2`, so make the optimizer afterwards. Raises
    `UserError` when the model has no such block: models of transformers 5 take `hf_experts.register()` instead.
    """
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in BLOCKS and isinstance(getattr(child, "experts", None), nn.ModuleList):
                setattr(parent, name, StackedMoeBlock(child).train(child.training))
                swapped += 1
    if not swapped:
        raise UserError(
            f"the model has no block of {', '.join(BLOCKS)} with separate experts; with transformers 5 use "
            "openlm_moe.interop.hf_experts.register()"
        )
    return swapped
