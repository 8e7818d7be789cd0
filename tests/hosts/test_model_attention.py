"""Rotary embeddings, causality, grouped queries, qk-norm and the key-value cache."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openlm_moe.hosts.builtin.attention import Attention, KeyValues
from openlm_moe.hosts.builtin.params import POSITIONS, ModelParams
from openlm_moe.hosts.builtin.rotary import Rotary


def params(**changes: object) -> ModelParams:
    return ModelParams(**{"dim": 32, "n_layers": 1, "n_heads": 4, "seq_len": 32, "vocab_size": 11, **changes})


def attention(p: ModelParams) -> Attention:
    module = Attention(p, Rotary(p.positional_embedding_type, p.head_dim, p.rope_theta))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double()


def distance(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("kind", ["rotary", "llama_rotary"])
def test_rotary_turns_each_pair_by_its_angle(kind: str) -> None:
    head_dim, theta, position = 8, 500.0, 3
    x = torch.randn(1, position + 1, 2, head_dim, dtype=torch.float64)
    out = Rotary(kind, head_dim, theta)(x)
    for i in range(head_dim // 2):
        a, b = (i, i + head_dim // 2) if kind == "rotary" else (2 * i, 2 * i + 1)
        angle = position * theta ** (-2 * i / head_dim)
        before, after = x[0, position, 1].tolist(), out[0, position, 1].tolist()
        assert after[a] == pytest.approx(before[a] * math.cos(angle) - before[b] * math.sin(angle), rel=1e-5)
        assert after[b] == pytest.approx(before[b] * math.cos(angle) + before[a] * math.sin(angle), rel=1e-5)


def test_head_rotary_turns_by_the_head_and_not_by_the_position() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    out = Rotary("head_rotary", 8)(x, offset=2)
    assert distance(out, Rotary("rotary", 8)(x.transpose(1, 2)).transpose(1, 2)) < 1e-12
    assert torch.equal(out[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("kind", ["rotary", "llama_rotary"])
def test_scores_depend_on_relative_positions_alone(kind: str) -> None:
    rotary = Rotary(kind, 16)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(q_position: int, k_position: int) -> float:
        return float((rotary(q, q_position) * rotary(k, k_position)).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), rel=1e-3)
    assert score(7, 3) != pytest.approx(score(8, 3), rel=1e-2)


def test_rotary_computes_in_fp32() -> None:
    x = torch.randn(1, 300, 1, 8).to(torch.bfloat16)
    rotary = Rotary("rotary", 8)
    assert torch.equal(rotary(x), rotary(x.float()).to(torch.bfloat16))
    # A table in bf16 would confuse positions beyond 256.
    assert not torch.equal(rotary(x[:, :1], offset=298), rotary(x[:, :1], offset=299))


def test_rotary_table_grows_and_survives_a_meta_build() -> None:
    with torch.device("meta"):
        rotary = Rotary("rotary", 8)
    x = torch.randn(1, 4, 1, 8)
    first = rotary(x, offset=100)
    rotary.extend(1000, x.device)
    assert torch.equal(rotary(x, offset=100), first)


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_future_does_not_reach_the_past(kind: str, qk_norm: bool) -> None:
    module = attention(params(positional_embedding_type=kind, qk_norm=qk_norm))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = module(x), module(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert distance(after[:, 5:], before[:, 5:]) > 1e-2


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_equals_its_formula(qk_norm: bool) -> None:
    p = params(dim=34, qk_norm=qk_norm, model_norm="rms_norm")  # 34 // 4 leaves a rest
    module, x = attention(p), torch.randn(2, 6, 34, dtype=torch.float64)
    q, k, v = module.in_proj(x).chunk(3, dim=-1)
    assert q.shape[-1] == 4 * 8
    q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (t.view(2, 6, 4, 8) for t in (q, k, v))
    q, k = module.rotary(q), module.rotary(k)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(2, 6, 32)
    assert distance(module(x), module.out_proj(out)) < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_equal_repeated_heads(kv_heads: int) -> None:
    grouped, full = attention(params(n_kv_heads=kv_heads)), attention(params())
    q, k, v = grouped.in_proj.weight.detach().split((32, kv_heads * 8, kv_heads * 8))
    k, v = (t.view(kv_heads, 8, 32).repeat_interleave(4 // kv_heads, dim=0).reshape(32, 32) for t in (k, v))
    full.load_state_dict({"in_proj.weight": torch.cat((q, k, v)), "out_proj.weight": grouped.out_proj.weight})
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    assert grouped.in_proj.weight.shape == (32 + 2 * kv_heads * 8, 32)
    assert distance(grouped(x), full(x)) < 1e-12


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_cache_equals_full_forward(kind: str, kv_heads: int) -> None:
    module = attention(params(positional_embedding_type=kind, n_kv_heads=kv_heads, qk_norm=True))
    x, cache = torch.randn(2, 9, 32, dtype=torch.float64), KeyValues()
    pieces = [module(piece, cache) for piece in x.split((4, 1, 3, 1), dim=1)]  # whole, one, several, one
    assert cache.length == 9
    assert distance(torch.cat(pieces, dim=1), module(x)) < 1e-12
