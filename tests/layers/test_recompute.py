"""Activation checkpointing reuses the routing of the first forward."""

import pytest
import torch

from openlm_moe import MoEConfig, build_moe, checkpoint, collect_losses
from openlm_moe.layers.recompute import remember
from openlm_moe.layers.router import Router

KINDS = pytest.mark.parametrize("use_reentrant", [False, True])


def layer(**settings):
    moe = build_moe(8, 0, MoEConfig(num_experts=4, ffn_dim=12, z_loss_weight=0.01, **settings)).double()
    moe.init_weights(seed=1)
    return moe


def gradients(moe, run):
    x = torch.randn(2, 9, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0), requires_grad=True)
    moe.zero_grad()
    with collect_losses(moe) as losses:
        run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in moe.parameters())], losses


@KINDS
def test_gradients_losses_and_records_equal_those_without(use_reentrant):
    moe = layer()
    want, plain = gradients(moe, moe)
    got, checkpointed = gradients(moe, lambda x: checkpoint(moe, x, use_reentrant=use_reentrant))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert torch.equal(plain.load_balancing_loss, checkpointed.load_balancing_loss)
    assert plain.load_balancing_loss > 0
    assert list(plain.per_layer) == list(checkpointed.per_layer)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_without_our_wrapper_is_right_too(use_reentrant):
    moe = layer()
    want, _ = gradients(moe, moe)
    got, losses = gradients(moe, lambda x: torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=use_reentrant))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert len(losses.per_layer) == 1


@KINDS
def test_recompute_takes_the_experts_of_the_first_forward(use_reentrant, monkeypatch):
    """A router that would choose others the second time must not: near-ties do that on a GPU."""
    moe = layer()
    forward, calls = Router.forward, []

    def flipping(self, x, mask=None):
        calls.append(None)
        self.weight.data.mul_(-1) if len(calls) == 2 else None  # another order of scores in the recompute
        routing = forward(self, x, mask)
        self.weight.data.mul_(-1) if len(calls) == 2 else None
        return routing

    chosen = []
    original = moe.dispatcher.dispatch

    def spy(x, weights, experts, n):
        chosen.append(experts)
        return original(x, weights, experts, n)

    monkeypatch.setattr(Router, "forward", flipping)
    monkeypatch.setattr(moe.dispatcher, "dispatch", spy)
    gradients(moe, lambda x: checkpoint(moe, x, use_reentrant=use_reentrant))
    assert len(chosen) == 2
    assert torch.equal(chosen[0], chosen[1])


@KINDS
def test_two_forwards_before_their_backwards(use_reentrant):
    moe = layer()
    xs = [torch.randn(5, 8, dtype=torch.double, requires_grad=True) for _ in range(2)]
    plain = torch.autograd.grad(sum(moe(x).square().sum() for x in xs), [*xs, moe.experts.w1])
    outs = [checkpoint(moe, x, use_reentrant=use_reentrant) for x in xs]
    moe.zero_grad()
    sum(out.square().sum() for out in outs).backward()
    for a, b in zip([xs[0].grad, xs[1].grad, moe.experts.w1.grad], plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_nested_checkpoints_replay_the_inner_one():
    drawn = []

    def inner(x):
        drawn.append(remember(lambda: torch.rand(())))
        return x * drawn[-1]

    def outer(x):
        return checkpoint(inner, x) * 2

    x = torch.ones((), requires_grad=True)
    checkpoint(outer, x).backward()
    assert len(drawn) >= 2
    assert all(torch.equal(d, drawn[0]) for d in drawn)
    torch.testing.assert_close(x.grad, 2 * drawn[0])
