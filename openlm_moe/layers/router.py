"""The router: token -> scores over experts -> the k experts it goes to, and with which weights.

Shapes: T tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe.config import MoEConfig
from openlm_moe.layers.init import local_part, truncated_normal
from openlm_moe.layers.recompute import remember


class Routing(NamedTuple):
    """What the router decided for T tokens, and what the losses need of how it came to it."""

    weights_TK: Tensor  # combine weights, fp32 (fp64 for fp64 input); 0 for masked tokens
    experts_TK: Tensor  # int64; E (no expert) for masked tokens
    logits_TE: Tensor
    probs_TE: Tensor  # scores that sum to 1 over E


class Router(nn.Module):
    """Linear router without bias. Computes in fp32 whatever the dtype of its input, its weight or autocast.

    In bf16, near-ties send tokens to other experts than in fp32. `expert_bias` takes part in the selection only, never
    in the weights (auxiliary-loss-free balancing, DeepSeek, arXiv 2408.15664); it exists under `balance="bias"`.
    """

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.balance == "bias" else None)

    @torch.no_grad()
    def init_weights(self, seed: int, layer_id: int) -> None:
        """Fills the weight by open_lm's rule for a linear layer; see `layers.init`."""
        std = self.weight.shape[1] ** -0.5
        whole = truncated_normal(tuple(self.weight.shape), std, seed, "layers", layer_id, "router")
        local, where = local_part(self.weight)
        local.copy_(whole[where])
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None) -> Routing:
        """Routes x (T, D); `mask_T` is False for tokens that count in nothing and go nowhere."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD.to(dtype)
            if self.training and self.config.jitter > 0:
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
            logits_TE = F.linear(x_TD, self.weight.to(dtype))
            return route(logits_TE, self.config, self.expert_bias, mask_T)


def route(logits_TE: Tensor, config: MoEConfig, bias_E: Tensor | None = None, mask_T: Tensor | None = None) -> Routing:
    """Scores, selection and combine weights of `logits_TE`. Softmax (or sigmoid) first, then top-k."""
    if config.score == "softmax":
        scores_TE = probs_TE = logits_TE.softmax(dim=-1)
    else:
        scores_TE = logits_TE.sigmoid()
        probs_TE = _normalized(scores_TE)
    experts_TK = remember(lambda: select_experts(scores_TE.detach(), config, bias_E))
    weights_TK = scores_TE.gather(1, experts_TK)
    if config.normalize_weights:
        weights_TK = _normalized(weights_TK)
    if mask_T is not None:
        experts_TK = experts_TK.masked_fill(~mask_T[:, None], logits_TE.shape[1])
        weights_TK = weights_TK.masked_fill(~mask_T[:, None], 0.0)
    return Routing(weights_TK, experts_TK, logits_TE, probs_TE)


def _normalized(scores: Tensor) -> Tensor:
    """Scores over their sum; scores that have all underflowed stay zeros."""
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def select_experts(scores_TE: Tensor, config: MoEConfig, bias_E: Tensor | None) -> Tensor:
    """Ids (T, K) of the experts with the highest scores; round robin under `uniform_routing`."""
    n_tokens, n_experts = scores_TE.shape
    if config.uniform_routing:
        slots = torch.arange(n_tokens * config.top_k, device=scores_TE.device)
        return (slots % n_experts).view(n_tokens, config.top_k)
    if bias_E is not None:
        scores_TE = scores_TE + bias_E.to(scores_TE.dtype)
    return scores_TE.topk(config.top_k, dim=-1).indices
