"""Parameter counts: the published table, formulas, and the sum of what the model really holds."""

from __future__ import annotations

import pytest
import torch

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.count import (
    build_on_meta,
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
    short_count,
)
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import FFN_TYPES, NORMS, ModelParams, load_model_params

# open_lm's MOE.md: parameters in training with 8 and 32 experts, and with the 2 experts that a token uses.
PUBLISHED = {
    "open_lm_41m": ("68.9M", "164.5M", "45.0M"),
    "open_lm_87m": ("165.4M", "439.9M", "96.8M"),
    "open_lm_160m": ("360.6M", "1.0B", "190.7M"),
    "open_lm_410m": ("1.1B", "3.5B", "509.2M"),
    "open_lm_830m": ("2.4B", "7.9B", "1.1B"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_table(name: str) -> None:
    params = load_model_params(name, {"model_norm": "gain_only_layer_norm"})
    with_8, with_32 = (count_parameters(params, MoEConfig(num_experts=e)) for e in (8, 32))
    assert (short_count(with_8.total), short_count(with_32.total), short_count(with_8.active)) == PUBLISHED[name]
    assert with_32.active == with_8.active


def formula(p: ModelParams, moe: MoEConfig) -> int:
    d, layers, q = p.dim, p.n_layers, p.n_heads * p.head_dim
    kv = p.kv_heads * p.head_dim
    per_norm = {"default_layer_norm": 2, "lp_layer_norm": 2, "no_wb_layer_norm": 0}.get(p.model_norm, 1)
    swiglu = 256 * -(-int(8 * d / 3) // 256)
    dense = {"swiglu": 3 * d * swiglu, "swiglu_torch": 3 * d * swiglu, "gelu": 8 * d * d}.get(
        p.ffn_type, 3 * d * swiglu + 2 * swiglu + d
    )
    expert = (3 if moe.ffn == "swiglu" else 2) * d * moe.hidden_dim(d)
    n_moe = len(moe.moe_layer_ids(layers))
    norms = 2 * layers * d + d + (layers * (q + kv) if p.qk_norm else 0) + (d if p.post_embed_norm else 0)
    return (
        (1 if p.weight_tying else 2) * p.vocab_size * d
        + layers * (d * (q + 2 * kv) + q * d)
        + per_norm * norms
        + (layers - n_moe) * dense
        + n_moe * (moe.num_experts * (expert + d) + moe.shared_experts * expert)
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ffn_type", FFN_TYPES)
@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(num_experts=0),
        MoEConfig(num_experts=4),
        MoEConfig(num_experts=3, every=1, ffn="swiglu", shared_experts=2, top_k=1),
        MoEConfig(num_experts=2, layers=(1,), ffn_dim=10, balance="bias"),
    ],
    ids=["dense", "every-other", "shared", "named"],
)
def test_counts_follow_the_formula_and_the_model(norm: str, ffn_type: str, moe: MoEConfig) -> None:
    for more in ({}, {"weight_tying": True}, {"n_kv_heads": 1, "qk_norm": True, "post_embed_norm": True}):
        p = ModelParams(20, 3, 3, 8, 50, model_norm=norm, ffn_type=ffn_type, **more)
        count = count_parameters(p, moe)
        assert count.total == formula(p, moe)
        assert count.total == sum(parameter.numel() for parameter in Transformer(p, moe).parameters())


def test_active_is_the_model_with_only_the_chosen_experts() -> None:
    p = ModelParams(24, 4, 3, 8, 50)
    for top_k in (1, 2, 4):
        count = count_parameters(p, MoEConfig(num_experts=16, top_k=top_k))
        assert count.active == count_parameters(p, MoEConfig(num_experts=top_k, top_k=top_k)).total
    dense = count_parameters(p, MoEConfig(num_experts=0))
    assert dense.active == dense.total


def test_nothing_is_allocated() -> None:
    model = build_on_meta(load_model_params("open_lm_7b"), MoEConfig(num_experts=32))
    assert all(p.device == torch.device("meta") for p in model.parameters())


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (1000, "1.0K"),
        (68_890_176, "68.9M"),
        (164_449_999, "164.4M"),
        (999_960_000, "1.0B"),
        (7.9e9, "7.9B"),
    ],
)
def test_short_count(number: float, text: str) -> None:
    assert short_count(number) == text


def matmul_flops_of_one_forward(p: ModelParams, moe: MoEConfig) -> float:
    """What torch's own counter sees in a forward of one sequence, experts left out since they are one custom op."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Transformer(p, moe)
    model.init_weights(0)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(1, p.seq_len, dtype=torch.int64))
    by_operation = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    return sum(flops for name, flops in by_operation.items() if "attention" not in name)


@pytest.mark.parametrize("ffn_type", ["swiglu", "gelu"])
def test_flops_against_torchs_counter(ffn_type: str) -> None:
    p = ModelParams(32, 3, 4, 16, 50, ffn_type=ffn_type, n_kv_heads=2)
    for moe in (MoEConfig(num_experts=0), MoEConfig(num_experts=4, every=2)):
        count = count_parameters(p, moe)
        parts = forward_flops_per_token(p, moe, count)
        counted = sum(parts.values()) - parts["attention scores"] - parts["experts"]
        assert matmul_flops_of_one_forward(p, moe) == pytest.approx(counted * p.seq_len)
        assert flops_per_token(p, moe) == 3 * sum(parts.values())


def test_flops_of_experts_and_attention_by_hand() -> None:
    p, moe = ModelParams(32, 4, 4, 16, 50), MoEConfig(num_experts=8, top_k=2)
    parts = forward_flops_per_token(p, moe, count_parameters(p, moe))
    assert parts["experts"] == 2 * 2 * 2 * (2 * 32 * 128)  # 2 layers x 2 experts x (2 matrices), 2 FLOPs a weight
    scores_and_values = [2 * 2 * 32 * keys for keys in range(1, 17)]
    assert parts["attention scores"] == pytest.approx(4 * sum(scores_and_values) / 16)
