"""Causal self-attention with open_lm's names, grouped-query heads and a key-value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe.hosts.builtin.norms import make_norm
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.hosts.builtin.rotary import Rotary


class KeyValues:
    """Keys and values of the positions that one attention layer has seen: (B, S, kv_heads, head_dim) each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new positions and returns all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=1), torch.cat((self.values, values), dim=1)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    """`in_proj` holds the rows of queries, keys and values, in this order; `out_proj` maps the heads back to dim.

    Queries and keys are normalised over all their heads together (`qk_norm`), then rotated, then attend causally.
    """

    def __init__(self, params: ModelParams, rotary: Rotary) -> None:
        super().__init__()
        self.n_heads, self.kv_heads, self.head_dim = params.n_heads, params.kv_heads, params.head_dim
        q_dim, kv_dim = self.n_heads * self.head_dim, self.kv_heads * self.head_dim
        self.in_proj = nn.Linear(params.dim, q_dim + 2 * kv_dim, bias=False)
        self.out_proj = nn.Linear(q_dim, params.dim, bias=False)
        self.q_norm = make_norm(params.model_norm, q_dim, params.norm_eps) if params.qk_norm else nn.Identity()
        self.k_norm = make_norm(params.model_norm, kv_dim, params.norm_eps) if params.qk_norm else nn.Identity()
        self.rotary = rotary

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        """x (B, S, dim) -> (B, S, dim). With a cache, x continues the positions that the cache holds."""
        kv_dim = self.kv_heads * self.head_dim
        q, k, v = self.in_proj(x).split((self.n_heads * self.head_dim, kv_dim, kv_dim), dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.n_heads, self.head_dim))
        k, v = (t.unflatten(-1, (self.kv_heads, self.head_dim)) for t in (k, v))
        offset = 0 if cache is None else cache.length
        # A norm in fp32 under autocast leaves q and k wider than v.
        q, k = self.rotary(q, offset).to(v.dtype), self.rotary(k, offset).to(v.dtype)
        if cache is not None:
            k, v = cache.append(k, v)
        out = _attend(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out_proj(out.transpose(1, 2).flatten(-2))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, heads, S, head_dim); the queries are the last positions of the keys."""
    new, total = q.shape[2], k.shape[2]
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=new == total, enable_gqa=k.shape[1] != q.shape[1]
    )
