"""MoEConfig: what it refuses and what it derives."""

import json

import pytest

from openlm_moe import MoEConfig, UserError
from openlm_moe.config import swiglu_hidden_dim


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(num_experts=1, top_k=2), r"top_k is 2 but there are only 1 experts.*--top-k.*--experts"),
        (dict(top_k=0), "top_k is 0"),
        (dict(every=0), "every is 0"),
        (dict(ffn="relu"), "ffn is 'relu'; it must be one of gelu, swiglu"),
        (dict(balance_scope="world"), "balance_scope is 'world'"),
        (dict(capacity_factor=0.0), "capacity_factor is 0.0"),
        (dict(jitter=1.0), "jitter is 1.0"),
        (dict(loss_weight=-0.1), "loss_weight is -0.1"),
        (dict(loss_weight=float("nan")), "loss_weight is nan"),
        (dict(ffn_dim=0), "ffn_dim is 0"),
        (dict(num_experts="8"), "num_experts is '8'; it must be a whole number"),
        (dict(top_k=2.0), "top_k is 2.0"),
        (dict(top_k=True), "top_k is True"),
        (dict(ffn_dim=16.0), "ffn_dim is 16.0"),
        (dict(jitter=None), "jitter is None; it must be a number"),
        (dict(normalize_weights=1), "normalize_weights is 1; it must be True or False"),
        (dict(layers=2), "layers is 2; it must be a list of layer ids"),
        (dict(layers=["0"]), "layers is \\['0'\\]"),
    ],
)
def test_refusals_name_the_value(settings, words):
    with pytest.raises(UserError, match=words):
        MoEConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "n_layers", "want"),
    [
        (dict(every=2), 5, (0, 2, 4)),
        (dict(every=1), 3, (0, 1, 2)),
        (dict(every=4), 12, (0, 4, 8)),
        (dict(layers=(3, 1)), 4, (1, 3)),
        (dict(num_experts=0), 4, ()),
    ],
)
def test_placement(settings, n_layers, want):
    assert MoEConfig(**settings).moe_layer_ids(n_layers) == want


def test_a_layer_outside_the_model_is_refused():
    with pytest.raises(UserError, match="names layer 4, but the model has layers 0 to 3"):
        MoEConfig(layers=(1, 4)).moe_layer_ids(4)


def test_hidden_dims():
    assert MoEConfig().hidden_dim(288) == 1152
    assert MoEConfig(ffn="swiglu").hidden_dim(288) == swiglu_hidden_dim(288) == 768
    assert MoEConfig(ffn_dim=100).hidden_dim(288) == 100


def test_round_trip_through_json():
    config = MoEConfig(layers=(1, 3), balance="bias")
    assert MoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_setting_is_named():
    with pytest.raises(UserError, match="unknown MoE setting 'expert'"):
        MoEConfig.from_dict({"expert": 8})
