"""One optimizer step: gradients do not depend on how a batch is cut, auxiliary losses count once, NaN steps nothing."""

import argparse
from dataclasses import replace

import pytest
import torch

from openlm_moe import MoEConfig, collect_losses
from openlm_moe.hosts.builtin.lm_loss import summed_loss
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.optimizer import make_optimizer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.hosts.builtin.precision import LossScale, Precision
from openlm_moe.hosts.builtin.step import NonFinite, StepRules, train_step
from openlm_moe.hosts.builtin.targets import Masking, make_example
from openlm_moe.telemetry.meters import StepMeter

PARAMS = ModelParams(dim=16, n_layers=3, n_heads=2, seq_len=8, vocab_size=32)
FP32 = Precision("cpu", None)
ARGS = argparse.Namespace(wd=0.0, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


def rules(moe, **changes):
    base = StepRules(
        moe=moe,
        accum_freq=1,
        grad_clip_norm=None,
        z_loss_coefficient=0.0,
        seed=0,
        rank=0,
        world_size=1,
        counts_vary=False,
    )
    return replace(base, **changes)


def make_model(moe):
    model = Transformer(PARAMS, moe)
    model.init_weights(0)
    return model.double().train()


def batch(masking=None, samples=8):
    tokens = torch.randint(0, 32, (samples, 9), generator=torch.Generator().manual_seed(5))
    return make_example(tokens, None, masking or Masking())


def step(model, example, how, optimizer=None, scale=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    return train_step(model, optimizer, example, 0, how, FP32, scale or LossScale(False), StepMeter())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(one, other, tolerance=1e-12):
    return all((one[name] - other[name]).abs().max() <= tolerance * one[name].abs().max() for name in one)


@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(num_experts=4, balance_scope="sequence", loss_weight=0.5, z_loss_weight=0.1),
        MoEConfig(num_experts=4, balance_scope="global", loss_weight=0.5, jitter=0.0),
        MoEConfig(num_experts=4, loss_weight=0.0),
        MoEConfig(num_experts=0),
    ],
    ids=["sequence", "global", "no loss", "dense"],
)
@pytest.mark.parametrize("masking", [Masking(), Masking(left=3, pad=7)], ids=["all", "masked"])
def test_gradients_do_not_depend_on_accumulation(moe, masking):
    example = batch(masking)
    found = []
    for accum in (1, 4):
        model = make_model(moe)
        result = step(model, example, rules(moe, accum_freq=accum, counts_vary=masking.active, z_loss_coefficient=0.1))
        found.append((result, gradients(model)))
    (one, grads_one), (four, grads_four) = found
    assert same(grads_one, grads_four)
    for what in ("loss", "load_balancing_loss", "router_z_loss", "z_loss", "grad_norm"):
        assert getattr(four, what) == pytest.approx(getattr(one, what), rel=1e-12), what
    assert one.targets == four.targets == int((example.targets != -100).sum())
    for name, counts in one.tokens_per_expert.items():
        assert torch.equal(counts, four.tokens_per_expert[name])


def test_the_loss_is_the_mean_over_targets_and_the_norm_that_of_its_gradient():
    moe = MoEConfig(num_experts=4, loss_weight=0.0)
    model, example = make_model(moe), batch(Masking(pad=7))
    result = step(model, example, rules(moe, counts_vary=True))
    logits = model(example.inputs, example.mask)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), example.targets.flatten(), ignore_index=-100)
    assert result.loss == pytest.approx(mean.item(), rel=1e-12)
    grads = torch.autograd.grad(mean, list(model.parameters()))
    assert result.grad_norm == pytest.approx(torch.sqrt(sum(g.square().sum() for g in grads)).item(), rel=1e-12)


def test_auxiliary_losses_are_counted_once():
    """The gradient is that of cross-entropy + mean over MoE layers of weight * loss, made here by hand."""
    moe = MoEConfig(num_experts=4, loss_weight=0.5, z_loss_weight=0.25)
    model, example = make_model(moe), batch()
    result = step(model, example, rules(moe))
    ours = gradients(model)

    model.zero_grad()
    seen = []
    handles = [
        model.layers[i].feed_forward.router.register_forward_hook(lambda m, a, out: seen.append(out)) for i in (0, 2)
    ]
    total = summed_loss(model(example.inputs), example.targets).cross_entropy / example.targets.numel()
    balancing = router_z = 0.0
    for routing in seen:
        fraction = torch.bincount(routing.experts_TK.flatten(), minlength=4) / routing.experts_TK.numel()
        balancing = balancing + 0.5 * 4 * (fraction * routing.probs_TE.mean(0)).sum() / 2
        router_z = router_z + 0.25 * routing.logits_TE.logsumexp(-1).square().mean() / 2
    (total + balancing + router_z).backward()
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    assert same(gradients(model), ours)
    assert result.load_balancing_loss == pytest.approx(balancing.item())
    assert result.router_z_loss == pytest.approx(router_z.item())


def test_global_scope_uses_the_counts_of_the_whole_step():
    example = batch()
    whole = MoEConfig(num_experts=4, balance_scope="global", loss_weight=10.0)
    parts = replace(whole, balance_scope="micro")
    wanted, got, other = make_model(whole), make_model(whole), make_model(parts)
    step(wanted, example, rules(parts))  # one micro-batch is the whole step
    step(got, example, rules(whole, accum_freq=4))
    step(other, example, rules(parts, accum_freq=4))
    assert same(gradients(wanted), gradients(got))
    assert not same(gradients(wanted), gradients(other), 1e-3)


def test_jitter_is_the_same_in_the_counting_pass():
    moe = MoEConfig(num_experts=4, balance_scope="global", jitter=0.3)
    model = make_model(moe)
    counted = []
    step(model, batch(), rules(moe, accum_freq=4))

    def spy(model, **how):
        counted.append(how.get("reduce_counts"))
        return collect_losses(model, **how)

    result = step(model, batch(), rules(moe, accum_freq=4, collect=spy))
    assert [how is None for how in counted] == [True] * 4 + [False] * 4
    for name, counts in result.tokens_per_expert.items():
        assert torch.equal(counted[-1](name, None), counts)


def test_clipping_scales_to_the_limit():
    moe = MoEConfig(num_experts=4)
    model = make_model(moe)
    result = step(model, batch(), rules(moe, grad_clip_norm=0.01))
    assert result.grad_norm > 0.02
    left = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
    assert left == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("accum", [1, 4])
def test_biases_move_once_a_step(accum):
    moe = MoEConfig(num_experts=4, balance="bias", bias_update_rate=0.5)
    model = make_model(moe)
    result = step(model, batch(), rules(moe, accum_freq=accum))
    for layer in (0, 2):
        counts = result.tokens_per_expert[f"layers.{layer}.feed_forward"].double()
        move = 0.5 * torch.sign(counts.mean() - counts)
        bias = model.layers[layer].feed_forward.router.expert_bias
        assert torch.allclose(bias.double(), move - move.mean())


def test_every_parameter_changes_in_one_step():
    moe = MoEConfig(num_experts=4, top_k=2)
    model = make_model(moe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, ARGS)
    step(model, batch(), rules(moe), optimizer)
    unchanged = [name for name, p in model.named_parameters() if torch.equal(before[name], p)]
    assert unchanged == []
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_an_expert_without_tokens_has_a_zero_gradient_and_is_stepped():
    moe = MoEConfig(num_experts=4, top_k=1)
    model = make_model(moe)
    with torch.no_grad():
        model.layers[0].feed_forward.router.weight[3] = 0
        model.layers[0].feed_forward.router.expert_bias = torch.tensor([0.0, 0, 0, -9])
    optimizer = make_optimizer(model, ARGS)
    step(model, batch(), rules(moe), optimizer)
    w1 = model.layers[0].feed_forward.experts.w1
    assert w1.grad[3].abs().max() == 0 and w1.grad[:3].abs().max() > 0
    assert int(optimizer.state[w1]["step"]) == 1


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_nothing_is_stepped_when_something_is_not_finite(poison, monkeypatch):
    moe = MoEConfig(num_experts=4, balance="bias")
    model = make_model(moe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, ARGS)
    if poison == "loss":
        from openlm_moe.hosts.builtin import step as module

        original = module.summed_loss
        monkeypatch.setattr(
            module,
            "summed_loss",
            lambda *a: original(*a)._replace(cross_entropy=original(*a).cross_entropy * float("inf")),
        )
    else:
        model.layers[1].feed_forward.w3.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFinite) as caught:
        step(model, batch(), rules(moe), optimizer)
    assert caught.value.what == poison and caught.value.mine == (poison == "loss")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_fp16_overflow_skips_the_step_and_lowers_the_scale():
    moe = MoEConfig(num_experts=4)
    model = make_model(moe)
    scale = LossScale(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = model.output.weight.register_hook(lambda grad: grad * float("inf"))
    result = step(model, batch(), rules(moe), make_optimizer(model, ARGS), scale)
    assert result.skipped and scale.scale == 32768.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    hook.remove()

    plain = make_model(moe)
    step(plain, batch(), rules(moe))
    result = step(model, batch(), rules(moe), torch.optim.SGD(model.parameters(), lr=0.0), scale)
    assert not result.skipped
    assert same(gradients(plain), gradients(model))  # auxiliary gradients are scaled and unscaled as well
