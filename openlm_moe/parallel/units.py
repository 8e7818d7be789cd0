"""Which modules of a model are gathered together. Knows nothing of FSDP: it only looks at the module tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from openlm_moe.errors import UserError
from openlm_moe.layers.base import MoELayer, clean_name


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered by one collective. `keep_gathered`: from forward until backward."""

    kind: str  # "experts", "router", "dense" or "embedding"
    modules: list[nn.Module]
    keep_gathered: bool = False


def plan_units(model: nn.Module, blocks: list[nn.Module] | None = None, group_parts: bool = True) -> list[Unit]:
    """The units of `model`: every parameter is in exactly one, and none spans a MoE layer's all-to-all.

    blocks: the repeated modules; found by `find_blocks` where not given.
    group_parts: whether all that a block has beside its MoE layer is one unit. Right where all of it runs before the
        layer; a block with a part that runs after it (a norm of the layer's output, say) needs False.
    Tied parameters are left to the root, which has to hold them: the modules that share them span the whole model.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    names = {module: clean_name(name) for name, module in model.named_modules()}
    tied = tied_parameters(model)
    units: list[Unit] = []
    for block in blocks:
        units += _block_units(block, names, group_parts)
    for module in _outside(model, set(blocks), names):
        if any(parameter in tied for parameter in module.parameters()):
            continue
        if isinstance(module, nn.Embedding):
            units.append(Unit("embedding", [module]))
        else:
            units.append(Unit("dense", [module], keep_gathered=True))
    return units


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists that hold MoE layers; the layers' parents where there is no list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and _has_moe(m)]
    inner = {child for outer in lists for child in outer.modules() if child is not outer}
    blocks = [block for outer in lists if outer not in inner for block in outer]
    inside = {module for block in blocks for module in block.modules()}
    for parent in model.modules():
        if parent not in inside and any(isinstance(child, MoELayer) for child in parent.children()):
            blocks += [child for child in parent.children() if isinstance(child, MoELayer)]
    if not blocks:  # a dense model: the longest module list
        dense = sorted((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
        blocks = list(dense[-1]) if dense else []
    return blocks


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that more than one module holds."""
    seen: set[nn.Parameter] = set()
    tied: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if parameter in seen else seen).add(parameter)
    return tied


def _block_units(block: nn.Module, names: dict[nn.Module, str], group_parts: bool) -> Iterator[Unit]:
    if not _has_moe(block):
        yield Unit("dense", [block])
        return
    layers = [module for module in block.modules() if isinstance(module, MoELayer)]
    rest = list(_outside(block, set(layers), names)) if block not in layers else []
    yield from (Unit("dense", part) for part in ([rest] if group_parts and rest else [[module] for module in rest]))
    for layer in layers:
        _refuse_own_parameters(layer, names)
        for child in layer.children():
            if child is layer.experts:
                yield Unit("experts", [child])
            elif child is layer.router:
                yield Unit("router", [child], keep_gathered=True)
            elif any(True for _ in child.parameters()):
                yield Unit("dense", [child])


def _outside(module: nn.Module, excluded: set[nn.Module], names: dict[nn.Module, str]) -> Iterator[nn.Module]:
    """The largest modules inside `module` that have parameters and contain none of `excluded`."""
    _refuse_own_parameters(module, names)
    for child in module.children():
        if child in excluded:
            continue
        if any(part in excluded for part in child.modules()):
            yield from _outside(child, excluded, names)
        elif any(True for _ in child.parameters()):
            yield child


def _refuse_own_parameters(module: nn.Module, names: dict[nn.Module, str]) -> None:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own and _has_moe(module):
        raise UserError(
            f"{names[module] or 'the model'} encloses a MoE layer and owns the parameter {own[0]}: gathering it would "
            "span the layer's all-to-all; move it into a submodule of its own"
        )


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(part, MoELayer) for part in module.modules())
