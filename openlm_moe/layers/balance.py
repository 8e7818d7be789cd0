"""Balancing without an auxiliary loss: a selection bias per expert, moved once per optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from openlm_moe.layers.base import moe_layers


@torch.no_grad()
def update_expert_biases(model: nn.Module, tokens_per_expert: Mapping[str, Tensor]) -> None:
    """Raises the bias of underloaded experts and lowers that of overloaded ones, by `bias_update_rate` each.

    tokens_per_expert: layer name as in `LossCollector.per_layer` -> counts (E,) of the whole optimizer step, summed
        over micro-batches and ranks.

    Biases stay centred at 0, since only their differences select. Source: DeepSeek's auxiliary-loss-free balancing
    (arXiv 2408.15664, algorithm 1).
    """
    for name, layer in moe_layers(model):
        bias_E = layer.router.expert_bias
        if bias_E is None:
            continue
        load_E = tokens_per_expert[name].to(bias_E)
        bias_E += layer.config.bias_update_rate * torch.sign(load_E.mean() - load_E)
        bias_E -= bias_E.mean()
