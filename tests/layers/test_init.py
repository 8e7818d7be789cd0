"""Initial values: open_lm's rule per expert, independent of the layout."""

import pytest
import torch

from openlm_moe import MoEConfig, build_moe
from openlm_moe.layers.experts import Experts
from openlm_moe.layers.init import truncated_normal

# A normal cut at 3 deviations has this deviation, in units of the uncut one.
CUT = 0.9866


@pytest.mark.parametrize("layer_id", [0, 3])
def test_deviation_is_the_dense_one_for_a_single_experts_fan_in(layer_id):
    experts = Experts(64, 96, 384, "gelu", layer_id, "auto")
    experts.init_weights(0)
    assert experts.w1.std().item() == pytest.approx(CUT * 96**-0.5, rel=5e-3)
    assert experts.w2.std().item() == pytest.approx(CUT * 384**-0.5 / (2 * (layer_id + 1)) ** 0.5, rel=5e-3)
    assert experts.w1.abs().max() <= 3 * 96**-0.5


def test_an_experts_values_do_not_depend_on_how_many_there_are():
    few, many = (build_moe(16, 1, MoEConfig(num_experts=n)) for n in (2, 8))
    few.init_weights(7), many.init_weights(7)
    assert torch.equal(few.experts.w1, many.experts.w1[:2])
    assert torch.equal(few.experts.w2, many.experts.w2[:2])


def test_every_matrix_differs():
    values = [
        truncated_normal((4,), 1.0, seed, "layers", layer, "experts", matrix, expert)
        for seed in (0, 1)
        for layer in (0, 1)
        for matrix in ("w1", "w2")
        for expert in (0, 1)
    ]
    assert len({tuple(v.tolist()) for v in values}) == len(values)


def test_leaves_the_global_generator_alone():
    moe = build_moe(16, 0, MoEConfig(num_experts=2))
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    moe.init_weights(0)
    assert torch.equal(torch.rand(1), want)
