"""The activations and their derivatives, said plainly, and the dtype that sums are taken in."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def activate(pre: Tensor, activation: str | None) -> Tensor:
    """GELU by its tanh approximation, silu(gate) * up with the gate half first, or the identity."""
    if activation is None:
        return pre
    if activation == "gelu":
        return F.gelu(pre, approximate="tanh")
    gate, up = pre.chunk(2, dim=-1)
    return F.silu(gate) * up


def activate_backward(pre: Tensor, d: Tensor, activation: str | None) -> Tensor:
    """Gradient at `pre` from `d` at the activation."""
    if activation is None:
        return d
    if activation == "gelu":
        inner = math.sqrt(2 / math.pi)
        t = torch.tanh(inner * (pre + 0.044715 * pre**3))
        return d * (0.5 * (1 + t) + 0.5 * pre * (1 - t * t) * inner * (1 + 3 * 0.044715 * pre**2))
    gate, up = pre.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat([d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid], dim=-1)
