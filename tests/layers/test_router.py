"""The router: what it selects, with which weights, and in which precision."""

import pytest
import torch

from openlm_moe.config import MoEConfig
from openlm_moe.layers.router import Router, route

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, -1.0, 2.0]])


def router(**settings) -> Router:
    config = MoEConfig(num_experts=4, **settings)
    layer = Router(6, config)
    layer.init_weights(seed=0, layer_id=0)
    return layer


def test_softmax_comes_before_top_k():
    routing = route(LOGITS, MoEConfig(num_experts=4))
    softmax = LOGITS.softmax(-1)
    assert routing.experts_TK.tolist() == [[0, 1], [1, 3]]
    torch.testing.assert_close(routing.weights_TK, softmax.gather(1, routing.experts_TK))
    assert (routing.weights_TK.sum(-1) < 1).all()


def test_normalised_weights_equal_softmax_over_the_selected_logits():
    routing = route(LOGITS, MoEConfig(num_experts=4, normalize_weights=True))
    torch.testing.assert_close(routing.weights_TK, LOGITS.gather(1, routing.experts_TK).softmax(-1))


def test_top_1_normalised_is_exactly_one():
    routing = route(torch.randn(50, 4), MoEConfig(num_experts=4, top_k=1, normalize_weights=True))
    assert torch.equal(routing.weights_TK, torch.ones(50, 1))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_lie_in_zero_one_and_probabilities_sum_to_one(score, normalize):
    routing = route(5 * torch.randn(64, 8), MoEConfig(score=score, normalize_weights=normalize))
    assert ((routing.weights_TK > 0) & (routing.weights_TK <= 1)).all()
    torch.testing.assert_close(routing.probs_TE.sum(-1), torch.ones(64))


def test_sigmoid_weights_are_the_raw_scores():
    routing = route(LOGITS, MoEConfig(num_experts=4, score="sigmoid"))
    torch.testing.assert_close(routing.weights_TK, LOGITS.sigmoid().gather(1, routing.experts_TK))


def test_bias_moves_the_selection_and_not_the_weights():
    bias_E = torch.tensor([0.0, 0.0, 0.0, 10.0])
    routing = route(LOGITS, MoEConfig(num_experts=4, balance="bias"), bias_E)
    assert (routing.experts_TK[:, 0] == 3).all()
    torch.testing.assert_close(routing.weights_TK[:, 0], LOGITS.softmax(-1)[:, 3])


@pytest.mark.parametrize("normalize", [True, False])
def test_scores_that_underflow_make_no_nan(normalize):
    logits = torch.full((2, 4), -1e4, requires_grad=True)
    routing = route(logits, MoEConfig(num_experts=4, score="sigmoid", normalize_weights=normalize))
    (routing.weights_TK.sum() + routing.probs_TE.square().sum()).backward()
    assert routing.weights_TK.isfinite().all() and routing.probs_TE.isfinite().all() and logits.grad.isfinite().all()


def test_masked_tokens_go_nowhere():
    routing = route(LOGITS, MoEConfig(num_experts=4), mask_T=torch.tensor([True, False]))
    assert routing.experts_TK.tolist() == [[0, 1], [4, 4]]
    assert routing.weights_TK[1].tolist() == [0, 0]


@pytest.mark.parametrize("tokens", [7, 64])
def test_uniform_routing_is_balanced(tokens):
    config = MoEConfig(num_experts=4, uniform_routing=True)
    ids = route(torch.randn(tokens, 4), config).experts_TK
    counts = torch.bincount(ids.flatten(), minlength=4)
    assert counts.max() - counts.min() <= 1
    assert (ids[:, 0] != ids[:, 1]).all()


def test_computes_in_fp32_under_autocast_and_with_bf16_parameters():
    layer, x = router(), torch.randn(32, 6)
    want = x.bfloat16().float() @ layer.weight.detach().bfloat16().float().T
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.to(torch.bfloat16)(x.bfloat16()).logits_TE
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_jitter_reaches_training_only():
    layer, x = router(jitter=0.3), torch.randn(32, 6)
    plain = x @ layer.weight.T
    layer.train()
    assert not torch.allclose(layer(x).logits_TE, plain)
    layer.eval()
    first, second = layer(x).logits_TE, layer(x).logits_TE
    torch.testing.assert_close(first, plain)
    assert torch.equal(first, second)


def test_jitter_leaves_its_input_alone():
    layer, x = router(jitter=0.3).train(), torch.randn(32, 6)
    before = x.clone()
    layer(x)
    assert torch.equal(x, before)
