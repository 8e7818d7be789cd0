"""open_lm's dense feed-forwards, by their names."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe.config import swiglu_hidden_dim
from openlm_moe.errors import UserError


class SwiGLU(nn.Module):
    """w3(silu(gate) * up) with gate and up from one matrix `w12`, gate half first (arXiv 2002.05202)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = swiglu_hidden_dim(dim)
        self.w12 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class GemmaGeGLU(nn.Module):
    """down(gelu(gate(x)) * up(x)) with biases and the exact GELU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = swiglu_hidden_dim(dim)
        self.gate_proj = nn.Linear(dim, hidden)
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def make_feed_forward(kind: str, dim: int) -> nn.Module:
    """The dense feed-forward that open_lm calls `kind`. "swiglu" and "swiglu_torch" differ only in open_lm's kernel."""
    match kind:
        case "swiglu" | "swiglu_torch":
            return SwiGLU(dim)
        case "gelu":
            first, second = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
            return nn.Sequential(first, nn.GELU(), second)
        case "gemma_geglu":
            return GemmaGeGLU(dim)
    raise UserError(f"unknown feed-forward {kind!r}")
