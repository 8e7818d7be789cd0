"""What the rest of the house may rely on of a MoE layer, and how to find such layers in any model."""

from __future__ import annotations

from torch import nn

from openlm_moe.config import MoEConfig

WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


class MoELayer(nn.Module):
    """Base of all MoE layers."""

    config: MoEConfig
    layer_id: int
    router: nn.Module
    dispatcher: nn.Module
    experts: nn.Module
    shared: nn.Module | None


def moe_layers(model: nn.Module) -> list[tuple[str, MoELayer]]:
    """The model's MoE layers with their names, free of what wrappers add to them."""
    return [(clean_name(name), module) for name, module in model.named_modules() if isinstance(module, MoELayer)]


def clean_name(name: str) -> str:
    """A module's or parameter's name without the parts that torch.compile, FSDP1, DDP and checkpoint wrappers add."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
