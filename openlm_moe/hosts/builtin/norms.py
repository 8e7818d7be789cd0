"""open_lm's six normalisations, by their names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe.errors import UserError


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension with an optional gain (`weight`) and an optional `bias`.

    `low_precision` computes in autocast's dtype instead of fp32 (MosaicML composer's low-precision layer norm).
    """

    def __init__(self, dim: int, eps: float, gain: bool = True, bias: bool = True, low_precision: bool = False) -> None:
        super().__init__()
        self.dim, self.eps, self.low_precision = dim, eps, low_precision
        self.weight = nn.Parameter(torch.empty(dim)) if gain else None
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not (self.low_precision and torch.is_autocast_enabled(device)):
            return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(x.to(dtype), (self.dim,), weight, bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in fp32, times a gain (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def make_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """The norm that open_lm calls `kind`, over the last dimension of size `dim`. Gains start at 1, biases at 0."""
    match kind:
        case "default_layer_norm":
            return LayerNorm(dim, eps)
        case "lp_layer_norm":
            return LayerNorm(dim, eps, low_precision=True)
        case "gain_only_lp_layer_norm":
            return LayerNorm(dim, eps, bias=False, low_precision=True)
        case "gain_only_layer_norm":
            return LayerNorm(dim, eps, bias=False)
        case "no_wb_layer_norm":
            return LayerNorm(dim, eps, gain=False, bias=False)
        case "rms_norm":
            return RMSNorm(dim, eps)
    raise UserError(f"unknown norm {kind!r}")
