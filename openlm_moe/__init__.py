"""openlm-moe: dropless mixture-of-experts layers for training language models the open_lm way."""

from typing import Any

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.layers.balance import update_expert_biases
from openlm_moe.layers.base import MoELayer, moe_layers
from openlm_moe.layers.losses import LayerStats, LossCollector, collect_losses
from openlm_moe.layers.moe import CapacityMoE, DroplessMoE, build_moe
from openlm_moe.layers.recompute import checkpoint

__version__ = "0.1.0"

__all__ = [
    "CapacityMoE",
    "DroplessMoE",
    "LayerStats",
    "LossCollector",
    "MoEConfig",
    "MoELayer",
    "UserError",
    "build_moe",
    "checkpoint",
    "collect_losses",
    "moe_layers",
    "register_open_lm",
    "unregister_open_lm",
    "update_expert_biases",
]


def __getattr__(name: str) -> Any:
    """The open_lm adapter, imported when it is asked for: it brings FSDP along, and most programs want neither."""
    if name in ("register_open_lm", "unregister_open_lm"):
        from openlm_moe.hosts import open_lm

        return getattr(open_lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
