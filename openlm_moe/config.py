"""MoEConfig: every setting of the mixture-of-experts layers, validated once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from openlm_moe.errors import UserError

CHOICES = {
    "moe_type": ("dropless", "capacity"),
    "ffn": ("gelu", "swiglu"),
    "score": ("softmax", "sigmoid"),
    "balance": ("loss", "bias", "none"),
    "balance_scope": ("micro", "sequence", "global"),
    "backend": ("auto", "triton", "torch", "reference"),
}


def swiglu_hidden_dim(dim: int) -> int:
    """open_lm's hidden size of a dense SwiGLU FFN: 8/3 of the model dim, rounded up to a multiple of 256."""
    return 256 * ((int(2 * 4 * dim / 3) + 255) // 256)


@dataclass(frozen=True)
class MoEConfig:
    """Settings of all MoE layers of a model. `num_experts=0` is the dense model.

    Raises `UserError` for a value that no layer could be built with.
    """

    num_experts: int = 8
    top_k: int = 2
    every: int = 2  # layers with layer_id % every == 0, as in open_lm
    layers: tuple[int, ...] | None = None  # explicit layer ids; wins over `every`

    moe_type: str = "dropless"
    capacity_factor: float = 1.25  # read by moe_type "capacity" only

    ffn: str = "gelu"
    ffn_dim: int | None = None  # None: 4 * dim for gelu, open_lm's dense size for swiglu
    shared_experts: int = 0

    score: str = "softmax"
    normalize_weights: bool = False
    jitter: float = 0.0
    uniform_routing: bool = False

    balance: str = "loss"
    balance_scope: str = "micro"
    loss_weight: float = 0.1
    z_loss_weight: float = 0.0
    bias_update_rate: float = 1e-3

    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        for name in ("num_experts", "top_k", "every", "shared_experts"):
            self._require(type(getattr(self, name)) is int, name, "a whole number")
        self._require(self.ffn_dim is None or type(self.ffn_dim) is int, "ffn_dim", "a whole number or None")
        for name in ("capacity_factor", "jitter", "loss_weight", "z_loss_weight", "bias_update_rate"):
            self._require(type(getattr(self, name)) in (int, float), name, "a number")
        for name in ("normalize_weights", "uniform_routing"):
            self._require(type(getattr(self, name)) is bool, name, "True or False")
        if self.layers is not None:
            ids = isinstance(self.layers, Iterable) and all(type(i) is int for i in self.layers)
            self._require(ids, "layers", "a list of layer ids")
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
        self._require(self.num_experts >= 0, "num_experts", "0 (dense) or more")
        self._require(self.every >= 1, "every", "1 or more")
        self._require(self.top_k >= 1, "top_k", "1 or more")
        self._require(self.ffn_dim is None or self.ffn_dim >= 1, "ffn_dim", "1 or more")
        self._require(self.shared_experts >= 0, "shared_experts", "0 or more")
        self._require(0 < self.capacity_factor < math.inf, "capacity_factor", "above 0 and finite")
        self._require(0 <= self.jitter < 1, "jitter", "in [0, 1)")
        self._require(0 <= self.loss_weight < math.inf, "loss_weight", "0 or more, and finite")
        self._require(0 <= self.z_loss_weight < math.inf, "z_loss_weight", "0 or more, and finite")
        self._require(0 <= self.bias_update_rate < math.inf, "bias_update_rate", "0 or more, and finite")
        if 0 < self.num_experts < self.top_k:
            raise UserError(
                f"top_k is {self.top_k} but there are only {self.num_experts} experts; "
                f"lower --top-k to at most {self.num_experts} or raise --experts to at least {self.top_k}"
            )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise UserError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    def moe_layer_ids(self, n_layers: int) -> tuple[int, ...]:
        """Ids of the blocks whose feed-forward is a MoE layer, for a model of `n_layers` blocks."""
        if self.num_experts == 0:
            return ()
        if self.layers is None:
            return tuple(range(0, n_layers, self.every))
        outside = [i for i in self.layers if not 0 <= i < n_layers]
        if outside:
            raise UserError(f"--moe-layers names layer {outside[0]}, but the model has layers 0 to {n_layers - 1}")
        return self.layers

    def hidden_dim(self, dim: int) -> int:
        """Hidden size F of one expert for model dim `dim`."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 4 * dim if self.ffn == "gelu" else swiglu_hidden_dim(dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and for wandb's config; `MoEConfig.from_dict` reads them back."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["layers"] = None if self.layers is None else list(self.layers)
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoEConfig:
        """Inverse of `to_dict`; an unknown key raises `UserError` naming it."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"unknown MoE setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**values)
