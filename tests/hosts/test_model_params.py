"""open_lm's JSON schema and names: what loads, what wins, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openlm_moe import MoEConfig, UserError
from openlm_moe.hosts.builtin.params import ModelParams, load_model, load_model_params, model_names

# Published shapes (hidden, layers, heads); every one has sequences of 2048 tokens and 50432 words.
SHAPES = {
    "open_lm_11m": (96, 12, 12),
    "open_lm_25m": (192, 12, 12),
    "open_lm_41m": (288, 12, 12),
    "open_lm_87m": (488, 12, 12),
    "open_lm_160m": (768, 12, 12),
    "open_lm_410m": (1024, 24, 16),
    "open_lm_830m": (1536, 24, 16),
    "open_lm_1b": (2048, 24, 16),
    "open_lm_3b": (2560, 32, 32),
    "open_lm_7b": (4096, 32, 32),
    "open_lm_11m_v2": (96, 8, 4),
    "open_lm_79m_v2": (512, 8, 4),
    "open_lm_154m_v2": (576, 24, 8),
    "open_lm_411m_v2": (1024, 24, 8),
}
TINY = {"hidden_dim": 16, "n_layers": 4, "n_heads": 2, "seq_len": 8, "vocab_size": 10}


@pytest.fixture
def model_file(tmp_path: Path):
    def write(**values: object) -> str:
        path = tmp_path / "custom.json"
        path.write_text(json.dumps({**TINY, **values}))
        return str(path)

    return write


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name: str) -> None:
    dim, layers, heads = SHAPES[name]
    assert load_model_params(name) == ModelParams(dim, layers, heads, 2048, 50432)


def test_every_name_loads() -> None:
    assert set(SHAPES) | {"open_lm_test_tiny"} <= set(model_names())
    assert load_model_params("open_lm_test_tiny") == ModelParams(16, 2, 2, 16, 16)
    for name in model_names():
        load_model_params(name)


def test_head_dim_is_the_whole_quotient() -> None:
    assert load_model_params("open_lm_87m").head_dim == 40  # 488 / 12 = 40.67


def test_json_wins_over_flags(model_file) -> None:
    flags = {"qk_norm": True, "model_norm": "rms_norm", "ffn_type": "gelu", "name": "not a model flag"}
    open_file = load_model_params(model_file(), flags)
    assert (open_file.qk_norm, open_file.model_norm, open_file.ffn_type) == (True, "rms_norm", "gelu")
    closed = load_model_params(model_file(qk_norm=False, model_norm="lp_layer_norm"), flags)
    assert (closed.qk_norm, closed.model_norm, closed.ffn_type) == (False, "lp_layer_norm", "gelu")


def test_moe_keys_win_over_flags(model_file) -> None:
    moe = MoEConfig(num_experts=8, top_k=2, every=2)
    path = model_file(moe_num_experts=4, moe_freq=3, moe_top_k=1, moe_loss_weight=1, moe_layers=[1], moe_ffn="swiglu")
    _, merged = load_model(path, {}, moe)
    assert merged == MoEConfig(num_experts=4, every=3, top_k=1, loss_weight=1.0, layers=(1,), ffn="swiglu")
    assert load_model(model_file(), {}, moe)[1] == moe
    assert load_model(model_file(moe_freq=0), {}, moe)[1].moe_layer_ids(4) == ()


def test_mixtral_keys(model_file) -> None:
    loaded = load_model_params(model_file(n_kv_heads=1, rope_theta=1e6, norm_eps=1e-6))
    assert (loaded.kv_heads, loaded.rope_theta, loaded.norm_eps) == (1, 1e6, 1e-6)


def test_to_json_reads_back(tmp_path: Path) -> None:
    original = ModelParams(24, 2, 4, 16, 50, True, True, "rms_norm", 1e-6, True, "llama_rotary", 5e5, "gelu", 2)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(original.to_json()))
    assert load_model_params(str(path)) == original


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hiden_dim": 3}, "hiden_dim"),
        ({"moe_experts": 3}, "moe_experts"),
        ({"moe_weight_parallelism": True}, "FSDP"),
        ({"moe_expert_model_parallelism": True}, "--expert-parallel"),
        ({"n_heads": 5}, "even"),  # 16 // 5 = 3 cannot be rotated in pairs
        ({"n_kv_heads": 3}, "divisor"),
        ({"n_layers": 2.0}, "n_layers"),
        ({"qk_norm": "yes"}, "qk_norm"),
        ({"moe_top_k": "2"}, "moe_top_k"),
        ({"moe_top_k": 9, "moe_num_experts": 4}, "top_k"),
        ({"model_norm": "batch"}, "batch"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_refused_values(model_file, values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(model_file(**values), {}, MoEConfig())


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="open_lm_41m"):  # the known names are listed
        load_model_params("open_lm_42m")
    with pytest.raises(UserError, match="does not exist"):
        load_model_params(str(tmp_path / "none.json"))
    for text, message in (("{", "not valid JSON"), ("[1]", "one JSON object"), ('{"hidden_dim": 1}', "n_layers")):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_model_params(str(path))


def test_parallelism_keys_that_are_off_are_accepted(model_file) -> None:
    load_model_params(model_file(moe_weight_parallelism=False, moe_expert_model_parallelism=False))
