"""The experts: stacked weights and the computation over them. No routing, no communication.

Shapes: D model dim, F expert hidden dim, E experts, K top-k, N = S*K routed rows. S counts the source rows: the tokens
themselves on one rank, the received rows (with K = 1) under expert parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from openlm_moe.layers.init import expert_matrix, expert_std, local_part, truncated_normal
from openlm_moe_kernels import RoutePlan, expert_ffn


class Experts(nn.Module):
    """E feed-forward networks: `w1 (E, D, F)`, for SwiGLU `(E, D, 2F)` with the gate half first, and `w2 (E, F, D)`.

    Under expert parallelism the weights are DTensors sharded on dim 0 and each rank computes its own experts.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int, ffn: str, layer_id: int, backend: str) -> None:
        super().__init__()
        self.ffn, self.layer_id, self.backend = ffn, layer_id, backend
        self.dim, self.hidden_dim = dim, hidden_dim
        self.w1 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim * (2 if ffn == "swiglu" else 1)))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def initial_matrix(self, seed: int, expert: int, matrix: str) -> Tensor:
        """Initial `w1` or `w2` of the expert with global id `expert`, fp32 on the CPU."""
        shape = tuple(getattr(self, matrix).shape[1:])
        std = expert_std(matrix, self.dim, self.hidden_dim, self.layer_id)
        return expert_matrix(seed, self.layer_id, expert, matrix, shape, std)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills both stacks, or this rank's share of them, one expert's matrix at a time."""
        for matrix in ("w1", "w2"):
            weight, (experts, *inner) = local_part(getattr(self, matrix))
            for expert in range(experts.start, experts.stop):
                weight[expert - experts.start].copy_(self.initial_matrix(seed, expert, matrix)[tuple(inner)])

    def forward(self, x_SD: Tensor, weights_SK: Tensor, plan: RoutePlan) -> Tensor:
        """Sum over k of weight times expert: (S, D), in the dtype of x, or autocast's where that is on."""
        device = x_SD.device.type
        autocast = torch.is_autocast_enabled(device)
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        dtype = torch.get_autocast_dtype(device) if autocast and x_SD.dtype != torch.float64 else w1.dtype
        with torch.autocast(device, enabled=False):
            out_SD = expert_ffn(
                x_SD.to(dtype),
                weights_SK,
                w1.to(dtype),
                w2.to(dtype),
                plan,
                activation=self.ffn,
                backend=self.backend,
            )
        return out_SD if autocast else out_SD.to(x_SD.dtype)


class SharedExperts(nn.Module):
    """Experts that every token passes: one dense FFN as wide as `count` experts."""

    def __init__(self, count: int, dim: int, hidden_dim: int, ffn: str, layer_id: int) -> None:
        super().__init__()
        self.ffn, self.layer_id, self.hidden_dim = ffn, layer_id, hidden_dim
        width = count * hidden_dim
        self.w1 = nn.Parameter(torch.empty(width * (2 if ffn == "swiglu" else 1), dim))
        self.w2 = nn.Parameter(torch.empty(dim, width))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills both matrices with the deviations of a single expert."""
        for name, weight in (("w1", self.w1), ("w2", self.w2)):
            std = expert_std(name, self.w1.shape[1], self.hidden_dim, self.layer_id)
            whole = truncated_normal(tuple(weight.shape), std, seed, "layers", self.layer_id, "shared", name)
            local, where = local_part(weight)
            local.copy_(whole[where])

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) in the dtype of x, or autocast's where that is on, as of `Experts`."""
        autocast = torch.is_autocast_enabled(x_TD.device.type)
        hidden = F.linear(x_TD if autocast else x_TD.to(self.w1.dtype), self.w1)
        if self.ffn == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        out_TD = F.linear(hidden, self.w2)
        return out_TD if autocast else out_TD.to(x_TD.dtype)
