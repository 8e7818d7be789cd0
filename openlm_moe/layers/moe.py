"""The MoE feed-forward layer: router -> dispatch -> experts -> combine.

Shapes: B sequences, S positions, T = B*S tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe.config import MoEConfig
from openlm_moe.layers.base import MoELayer
from openlm_moe.layers.capacity import drop_over_capacity, expert_capacity
from openlm_moe.layers.dispatch import LocalDispatcher
from openlm_moe.layers.experts import Experts, SharedExperts
from openlm_moe.layers.losses import report
from openlm_moe.layers.recompute import checkpoint
from openlm_moe.layers.router import Router


class DroplessMoE(MoELayer):
    """Dropless mixture of experts (dMoE): every token reaches its k experts, and no padding is computed.

    Source: MegaBlocks (arXiv 2211.15841).
    """

    def __init__(self, dim: int, layer_id: int, config: MoEConfig) -> None:
        super().__init__()
        self.dim, self.layer_id, self.config = dim, layer_id, config
        hidden_dim = config.hidden_dim(dim)
        self.router = Router(dim, config)
        self.dispatcher = LocalDispatcher()
        self.experts = Experts(config.num_experts, dim, hidden_dim, config.ffn, layer_id, config.backend)
        self.shared = (
            SharedExperts(config.shared_experts, dim, hidden_dim, config.ffn, layer_id)
            if config.shared_experts
            else None
        )
        # Keywords of `checkpoint`, or None: recompute the experts' hidden rows in backward instead of keeping them.
        self.checkpoint_experts: dict[str, bool] | None = None

    def init_weights(self, seed: int) -> None:
        """Fills every weight; values depend on `seed` and the layer's place alone (see `layers.init`)."""
        self.router.init_weights(seed, self.layer_id)
        self.experts.init_weights(seed)
        if self.shared is not None:
            self.shared.init_weights(seed)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, S, D) or (T, D) -> the same shape.

        mask: bool (B, S) or (T,), False for padding, which is routed nowhere, gets zeros and counts in no loss.
        Raises ValueError where x or mask has another shape or dtype than that.
        """
        self._check(x, mask)
        x_BSD = x if x.dim() == 3 else x[None]
        mask_BS = x_BSD.new_ones(x_BSD.shape[:2], dtype=torch.bool) if mask is None else mask.view(x_BSD.shape[:2])
        x_TD = x_BSD.flatten(0, 1)
        if mask is not None:  # what padding holds may be NaN, which no weight of zero would stop
            x_TD = x_TD.masked_fill(~mask_BS.flatten()[:, None], 0.0)
        routing = self.router(x_TD, None if mask is None else mask_BS.flatten())
        admitted_TK = self.admit(routing.experts_TK)

        rows = self.dispatcher.dispatch(x_TD, routing.weights_TK, admitted_TK, self.config.num_experts)
        if self.checkpoint_experts is None:
            y_SD = self.experts(rows.x_SD, rows.weights_SK, rows.plan)
        else:
            y_SD = checkpoint(self.experts, rows.x_SD, rows.weights_SK, rows.plan, **self.checkpoint_experts)
        out_TD = self.dispatcher.combine(y_SD, rows)

        if self.shared is not None:
            shared_TD = self.shared(x_TD)
            out_TD = out_TD + (shared_TD if mask is None else shared_TD * mask_BS.flatten()[:, None])
        dropped = (admitted_TK != routing.experts_TK).sum()
        return report(self, routing, dropped, out_TD, mask_BS).view(x.shape)

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        if x.dim() not in (2, 3) or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, S, {self.dim}) or (T, {self.dim})")
        if not x.is_floating_point():
            raise ValueError(f"x has dtype {x.dtype}; expected a floating-point dtype")
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; expected {tuple(x.shape[:-1])}, as x")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool, True where there is a token")

    def admit(self, experts_TK: Tensor) -> Tensor:
        """The slots that are computed; dropless admits all."""
        return experts_TK


class CapacityMoE(DroplessMoE):
    """The GShard/Switch baseline: an expert takes `capacity_factor` times the balanced load and drops the rest.

    Tokens whose slots are all dropped leave the layer as zeros (the block's residual carries them). Capacity is counted
    over the tokens of one forward on one rank, padding left out.
    """

    def admit(self, experts_TK: Tensor) -> Tensor:
        config = self.config
        n_tokens = (experts_TK[:, 0] < config.num_experts).sum()  # without padding, which must change nothing
        capacity = expert_capacity(n_tokens, config.num_experts, config.top_k, config.capacity_factor)
        return drop_over_capacity(experts_TK, config.num_experts, capacity)


def build_moe(dim: int, layer_id: int, config: MoEConfig) -> DroplessMoE:
    """The MoE layer that `config` asks for, for block `layer_id` of a model of width `dim`."""
    return (CapacityMoE if config.moe_type == "capacity" else DroplessMoE)(dim, layer_id, config)
