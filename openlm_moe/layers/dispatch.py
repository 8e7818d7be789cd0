"""Dispatchers bring rows to the experts and results back. The only place of the layer with a collective.

Shapes: T tokens, D model dim, E experts of all ranks, L experts of one rank, P ranks of the expert-parallel group,
K top-k, N = T*K routed rows, R rows received by this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openlm_moe_kernels import RoutePlan, combine_topk, gather_rows, route_plan


@dataclass(frozen=True)
class Rows:
    """What the experts of this rank work on, and what the way back needs."""

    x_SD: Tensor
    weights_SK: Tensor
    plan: RoutePlan  # over this rank's experts
    sent: SentRows | None = None


@dataclass(frozen=True)
class SentRows:
    """This rank's side of an all-to-all: its rows in expert order and how many went to and came from each rank."""

    plan: RoutePlan  # over all experts
    send_splits: list[int]
    receive_splits: list[int]


class LocalDispatcher(nn.Module):
    """All experts are here: tokens stay where they are and the experts gather their rows by the plan."""

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int) -> Rows:
        """Rows for `Experts.forward`; ids of `num_experts` mean no expert."""
        return Rows(x_TD, weights_TK, route_plan(experts_TK, num_experts))

    def combine(self, y_TD: Tensor, rows: Rows) -> Tensor:
        """The experts' output is the layer's output."""
        return y_TD


class AllToAllDispatcher(nn.Module):
    """Expert parallelism: rank p of `group` holds experts [p*L, (p+1)*L), rows travel to them and back.

    Expert order is also destination order, since experts lie on the ranks in order. Combine weights travel with the
    rows, so that their gradient is computed where the experts are and the received rows are all that is saved.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __deepcopy__(self, memo: dict) -> AllToAllDispatcher:
        """A copy of the model (a weight average, say) talks to the same ranks; process groups cannot be copied."""
        return AllToAllDispatcher(self.group)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int) -> Rows:
        """Sends each row to its expert's rank. Rows arrive by source rank, then expert; `plan` sorts them by expert."""
        sent_plan = route_plan(experts_TK, num_experts)
        counts_PL = sent_plan.counts_E.view(dist.get_world_size(self.group), -1)
        received_PL = torch.empty_like(counts_PL)
        dist.all_to_all_single(received_PL, counts_PL, group=self.group)
        send_splits, receive_splits = splits_to_host(counts_PL, received_PL)
        sent = SentRows(sent_plan, send_splits, receive_splits)

        n_sent = sum(send_splits)  # rows of masked or dropped slots come last and stay
        x_RD = exchange(gather_rows(x_TD, sent_plan)[:n_sent], receive_splits, send_splits, self.group)
        weights_N = weights_TK.flatten()[sent_plan.order_N[:n_sent]]
        weights_R = exchange(weights_N, receive_splits, send_splits, self.group)

        local_ids_PL = torch.arange(received_PL.shape[1], device=x_TD.device).expand_as(received_PL)
        ids_R = local_ids_PL.flatten().repeat_interleave(received_PL.flatten(), output_size=sum(receive_splits))
        return Rows(x_RD, weights_R[:, None], route_plan(ids_R[:, None], received_PL.shape[1]), sent)

    def combine(self, y_RD: Tensor, rows: Rows) -> Tensor:
        """Sends the weighted results home and sums the k rows of each token."""
        sent = rows.sent
        y_ND = exchange(y_RD, sent.send_splits, sent.receive_splits, self.group)
        n_stayed = sent.plan.num_rows - y_ND.shape[0]
        y_ND = nn.functional.pad(y_ND, (0, 0, 0, n_stayed)) if n_stayed else y_ND
        return combine_topk(y_ND, None, sent.plan)


def splits_to_host(counts_PL: Tensor, received_PL: Tensor) -> tuple[list[int], list[int]]:
    """Rows to and from each rank as Python numbers. The layer's one wait on the device: all-to-all takes host sizes."""
    send, receive = torch.stack([counts_PL.sum(dim=1), received_PL.sum(dim=1)]).tolist()
    return send, receive


def exchange(rows: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """Differentiable all-to-all of rows (N, ...): `input_splits[p]` go to rank p, `output_splits[p]` come from it."""
    return _AllToAll.apply(rows, output_splits, input_splits, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, output_splits, input_splits, group):
        ctx.route = (input_splits, output_splits, group)
        return _all_to_all(rows, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.route), None, None, None


def _all_to_all(rows: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), output_splits, input_splits, group=group)
    return out
