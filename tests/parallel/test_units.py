"""Which modules become units, on models of other people's making."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openlm_moe import MoEConfig, UserError, build_moe
from openlm_moe.parallel.units import find_blocks, plan_units, tied_parameters

MOE = MoEConfig(num_experts=4, ffn_dim=8, shared_experts=1)


class Block(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.attention, self.norm, self.other_norm = nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.drop = nn.Dropout()
        self.mlp = nn.ModuleDict({"inner": build_moe(4, 0, MOE)}) if moe else nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"layers": nn.ModuleList(Block(kind == "m") for kind in pattern)})
        self.trunk["embed"] = nn.Embedding(7, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)


def names(model: nn.Module, units) -> list[tuple[str, str, bool]]:
    known = {module: name for name, module in model.named_modules()}
    return [(unit.kind, " + ".join(known[module] for module in unit.modules), unit.keep_gathered) for unit in units]


def test_units_of_a_nested_model():
    model = Model("dm")
    block = "trunk.layers.1"
    assert names(model, plan_units(model)) == [
        ("dense", "trunk.layers.0", False),
        ("dense", f"{block}.attention + {block}.norm + {block}.other_norm", False),
        ("router", f"{block}.mlp.inner.router", True),
        ("experts", f"{block}.mlp.inner.experts", False),
        ("dense", f"{block}.mlp.inner.shared", False),
        ("embedding", "trunk.embed", False),
        ("dense", "norm", True),
        ("dense", "head", True),
    ]


def test_parts_apart():
    model = Model("dm")
    found = [module for kind, module, _ in names(model, plan_units(model, group_parts=False)) if kind == "dense"]
    assert found[1:4] == [f"trunk.layers.1.{part}" for part in ("attention", "norm", "other_norm")]


@pytest.mark.parametrize("pattern", ["dm", "mm", "dd"])
def test_every_parameter_is_in_exactly_one_unit(pattern):
    model = Model(pattern)
    held = [p for unit in plan_units(model) for module in unit.modules for p in module.parameters()]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())


def test_blocks_may_be_named():
    model = Model("dm")
    model.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = names(model, plan_units(model, [*model.trunk["layers"], model.extra]))
    assert ("dense", "extra", False) in found


def test_a_layer_outside_of_any_list_is_its_own_block():
    model = nn.Module()
    model.first, model.moe = nn.Linear(4, 4), build_moe(4, 0, MOE)
    assert find_blocks(model) == [model.moe]
    kinds = [kind for kind, _, _ in names(model, plan_units(model))]
    assert sorted(kinds) == ["dense", "dense", "experts", "router"]


def test_tied_parameters_stay_with_the_root():
    model = Model("dm")
    model.head.weight = model.trunk["embed"].weight
    assert tied_parameters(model) == {model.head.weight}
    held = {p for unit in plan_units(model) for module in unit.modules for p in module.parameters()}
    assert set(model.parameters()) - held == {model.head.weight}


def test_a_parameter_that_encloses_a_layer_is_refused():
    model = Model("dm")
    model.trunk["layers"][1].scale = nn.Parameter(torch.ones(4))
    with pytest.raises(UserError, match=r"trunk\.layers\.1 encloses a MoE layer and owns the parameter scale"):
        plan_units(model)
    plain = Model("dd")
    plain.trunk["layers"][1].scale = nn.Parameter(torch.ones(4))
    assert len(plan_units(plain)) == 5
