"""Auxiliary losses of the router, and the collector that a training step opens and closes.

The gradient of a layer's auxiliary losses enters the graph at the layer's output, where the backward pass comes by
anyway. So the loss that the trainer sees is cross-entropy alone, no list outlives a step, and activation checkpointing
of either kind, accumulation and wrappers need no special care.

Shapes: B sequences, S positions, T = B*S tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openlm_moe.layers.base import MoELayer, moe_layers
from openlm_moe.layers.recompute import remember
from openlm_moe.layers.router import Routing

ReduceCounts = Callable[[str, Tensor], Tensor]


def count_tokens(experts_TK: Tensor, n_experts: int, n_sequences: int = 1) -> Tensor:
    """How many slots of each sequence go to each expert: int64 (B, E). Slots without expert (id E) are not counted."""
    ids_BN = experts_TK.reshape(n_sequences, experts_TK.numel() // max(n_sequences, 1))
    counts = ids_BN.new_zeros(n_sequences, n_experts + 1).scatter_add_(1, ids_BN, torch.ones_like(ids_BN))
    return counts[:, :n_experts]


def load_balancing_loss(counts_BE: Tensor, probs_BSE: Tensor, valid_BS: Tensor) -> Tensor:
    """E * sum_e(f_e * P_e) of each of B groups of tokens, averaged over the groups by their valid tokens.

    f_e is the fraction of a group's routed slots that went to expert e, P_e the mean probability of e over its valid
    tokens; 1 when routing is uniform. B is 1 to treat all tokens as one group. Source: Switch Transformer (arXiv
    2101.03961, eq. 4) with f over all k slots, as in GShard and MegaBlocks.
    """
    valid_BS, counts_BE = valid_BS.to(probs_BSE.dtype), counts_BE.to(probs_BSE.dtype)
    f_BE = counts_BE / counts_BE.sum(dim=1, keepdim=True).clamp(min=1)
    summed_probs_BE = torch.einsum("bse,bs->be", probs_BSE, valid_BS)  # P_e times the group's valid tokens
    return probs_BSE.shape[-1] * (f_BE * summed_probs_BE).sum() / valid_BS.sum().clamp(min=1)


def router_z_loss(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Mean over valid tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)."""
    squares_T = logits_TE.logsumexp(dim=-1).square() * valid_T
    return squares_T.sum() / valid_T.sum().clamp(min=1)


@dataclass(frozen=True)
class LayerStats:
    """One layer's routing of one micro-batch. Tensors are detached and stay on the device until read."""

    tokens_per_expert_E: Tensor  # routed slots, before any capacity limit
    dropped: Tensor  # slots over capacity; 0 when dropless
    load_balancing_loss: Tensor  # not weighted; 1 when balanced
    z_loss: Tensor  # not weighted


class LossCollector:
    """What the MoE layers of one model report of one micro-batch. Made by `collect_losses`."""

    def __init__(self, layers: dict[MoELayer, str], share: float, scale: float, reduce: ReduceCounts | None) -> None:
        self._names = layers
        self._coefficient = share * scale / max(len(layers), 1)
        self._reduce = reduce
        self._weighted: list[tuple[Tensor, Tensor]] = []
        self.per_layer: dict[str, LayerStats] = {}

    @property
    def load_balancing_loss(self) -> Tensor:
        """Weighted load-balancing loss, averaged over the model's MoE layers: fp32 scalar."""
        return self._mean(0)

    @property
    def z_loss(self) -> Tensor:
        """Weighted router z-loss, averaged over the model's MoE layers: fp32 scalar."""
        return self._mean(1)

    def _mean(self, which: int) -> Tensor:
        if not self._weighted:
            return torch.zeros(())
        return torch.stack([pair[which] for pair in self._weighted]).sum() / len(self._names)

    def reduced_counts(self, layer: MoELayer, counts_E: Tensor) -> Tensor:
        """Counts of the whole step for scope `global`; this micro-batch's where nothing was said of others."""
        return counts_E if self._reduce is None else self._reduce(self._names[layer], counts_E)

    def add(self, layer: MoELayer, stats: LayerStats) -> None:
        """Called once by each layer in its first forward. RuntimeError when a layer reports twice."""
        name = self._names[layer]
        if name in self.per_layer:
            name = name or type(layer).__name__  # the model is the layer itself
            raise RuntimeError(f"{name} ran twice inside one collect_losses; open one for each micro-batch")
        config = layer.config
        weight = config.loss_weight if config.balance == "loss" else 0.0
        self._weighted.append((stats.load_balancing_loss * weight, stats.z_loss * config.z_loss_weight))
        self.per_layer[name] = stats

    def knows(self, layer: MoELayer) -> bool:
        """Whether `layer` belongs to the model that the collector was opened for."""
        return layer in self._names

    def attach(self, out: Tensor, loss: Tensor) -> Tensor:
        """`out` itself, whose backward also sends this micro-batch's part of `loss`' gradient into the graph."""
        if not (out.requires_grad and loss.requires_grad):
            return out
        return _AttachLoss.apply(out, loss, self._coefficient)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, loss, coefficient):
        ctx.coefficient, ctx.like = coefficient, torch.empty_like(loss)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.like, ctx.coefficient), None


# A plain stack, not a context variable: see recompute.py.
_open: list[LossCollector] = []


@contextmanager
def collect_losses(
    model: nn.Module, *, share: float = 1.0, scale: float = 1.0, reduce_counts: ReduceCounts | None = None
) -> Iterator[LossCollector]:
    """Collects auxiliary losses and expert load of one micro-batch; open it around forward and backward.

    While it is open and the model trains, the auxiliary losses' gradients are added in backward, weighted as `config`
    says: do not add them to the loss. Without it, no auxiliary loss acts.

    share: valid tokens of this micro-batch over those of the whole step, all micro-batches and ranks together.
    scale: what the loss is multiplied by before backward (a GradScaler's scale).
    reduce_counts: for `balance_scope="global"`; called as (layer name, int64 counts (E,)) and returns the counts of the
        whole step. A step with several micro-batches finds them by a first pass without gradient.
    """
    collector = LossCollector({layer: name for name, layer in moe_layers(model)}, share, scale, reduce_counts)
    _open.append(collector)
    try:
        yield collector
    finally:
        _open.remove(collector)


def report(layer: MoELayer, routing: Routing, dropped: Tensor, out: Tensor, mask_BS: Tensor) -> Tensor:
    """Reports `layer`'s routing to the open collector, if there is one, and returns `out` with the losses attached.

    `mask_BS` gives the batch its sequences; it is all True where no token is padding.
    """
    collector = remember(lambda: next((c for c in reversed(_open) if c.knows(layer)), None))
    if collector is None:
        return out
    config = layer.config
    n_sequences, n_experts = mask_BS.shape[0], routing.probs_TE.shape[1]
    with torch.autocast(out.device.type, enabled=False):
        counts_BE = count_tokens(routing.experts_TK, n_experts, n_sequences)
        counts_E = counts_BE.sum(dim=0)
        probs_BSE = routing.probs_TE.view(*mask_BS.shape, n_experts)
        if config.balance_scope != "sequence":
            counts_BE = counts_E[None]
            probs_BSE, mask = probs_BSE.flatten(0, 1)[None], mask_BS.flatten()[None]
            if config.balance_scope == "global":
                counts_BE = remember(lambda: collector.reduced_counts(layer, counts_E))[None]
        else:
            mask = mask_BS
        balancing = load_balancing_loss(counts_BE, probs_BSE, mask)
        z_loss = router_z_loss(routing.logits_TE, mask_BS.flatten())
        if not in_recompute():
            collector.add(layer, LayerStats(counts_E, dropped, balancing.detach(), z_loss.detach()))
        loss = config.z_loss_weight * z_loss
        if config.balance == "loss":
            loss = loss + config.loss_weight * balancing
        return collector.attach(out, loss) if layer.training else out


def in_recompute() -> bool:
    """Whether this forward runs inside a backward pass, that is, for activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
