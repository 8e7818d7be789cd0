"""Auxiliary losses: values, gradients, scopes, padding, and the collector."""

import pytest
import torch
from torch import nn

from openlm_moe import MoEConfig, build_moe, collect_losses, update_expert_biases
from openlm_moe.layers.losses import count_tokens, load_balancing_loss, router_z_loss

D, E = 8, 4


class Model(nn.Module):
    """Blocks 0, 2 and 4 of five are MoE: a layer count that the frequency does not divide."""

    def __init__(self, **settings):
        super().__init__()
        config = MoEConfig(num_experts=E, ffn_dim=12, **settings)
        moe = config.moe_layer_ids(5)
        self.layers = nn.ModuleList(build_moe(D, i, config) if i in moe else nn.Linear(D, D) for i in range(5))
        for i in moe:
            self.layers[i].init_weights(seed=3)
        self.double()

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + (layer(x, mask) if hasattr(layer, "router") else layer(x))
        return x


def batch(n=4, s=6, seed=0):
    return torch.randn(n, s, D, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def router_gradients(model):
    return [layer.router.weight.grad.clone() for layer in model.layers if hasattr(layer, "router")]


def test_formula_on_known_numbers():
    experts = torch.tensor([[0, 1], [0, 2], [0, 1]])  # 3 tokens, k = 2: f = 1/2, 1/3, 1/6, 0
    probs = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.2, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]])
    loss = load_balancing_loss(count_tokens(experts, 4), probs[None], torch.ones(1, 3))
    assert loss.item() == pytest.approx(4 * (0.5 / 2 + 0.2 / 3 + 0.2 / 6), rel=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_uniform_routing_scores_one(top_k):
    experts = torch.arange(8 * top_k).view(8, top_k) % E
    loss = load_balancing_loss(count_tokens(experts, E), torch.full((1, 8, E), 1 / E), torch.ones(1, 8))
    assert loss.item() == pytest.approx(1.0, rel=1e-6)


def test_collapse_scores_the_number_of_experts():
    probs = torch.zeros(1, 8, E)
    probs[..., 2] = 1
    loss = load_balancing_loss(count_tokens(torch.full((8, 1), 2), E), probs, torch.ones(1, 8))
    assert loss.item() == pytest.approx(E)


def test_z_loss_on_known_numbers():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    want = (torch.log(torch.tensor(2.0)) ** 2 + (1 + torch.log(torch.tensor(2.0))) ** 2) / 2
    torch.testing.assert_close(router_z_loss(logits, torch.ones(2)), want)


def test_layers_that_collapse_on_different_experts_are_not_balanced():
    model = Model(top_k=1, loss_weight=1.0)
    for target, layer in zip((0, 1, 2), (model.layers[i] for i in (0, 2, 4)), strict=True):
        layer.router.weight.data.zero_()
        layer.router.weight.data[target] = 50.0
    with collect_losses(model) as losses:
        model(batch().abs() + 5)
    assert losses.load_balancing_loss.item() > 0.9 * E


def test_uniform_model_logs_the_weight():
    model = Model(uniform_routing=True)
    for i in (0, 2, 4):
        model.layers[i].router.weight.data.zero_()
    with collect_losses(model) as losses:
        model(batch())
    assert losses.load_balancing_loss.item() == pytest.approx(0.1, rel=1e-6)


def test_injected_gradient_equals_the_sum_of_task_and_weighted_losses():
    model = Model(loss_weight=0.3, z_loss_weight=0.2)
    with collect_losses(model, share=0.5, scale=4.0):
        (4.0 * model(batch()).square().sum()).backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    routings = []
    hooks = [
        layer.router.register_forward_hook(lambda _m, _i, out: routings.append(out))
        for layer in model.layers
        if hasattr(layer, "router")
    ]
    total = 4.0 * model(batch()).square().sum()
    for r in routings:
        f = torch.bincount(r.experts_TK.flatten(), minlength=E) / r.experts_TK.numel()
        balancing = E * (f * r.probs_TE.mean(0)).sum()
        total = total + 4.0 * 0.5 / 3 * (0.3 * balancing + 0.2 * r.logits_TE.logsumexp(-1).square().mean())
    total.backward()
    for hook in hooks:
        hook.remove()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_without_a_collector_or_in_evaluation_nothing_is_injected():
    model = Model(loss_weight=5.0)
    model(batch()).sum().backward()
    plain = router_gradients(model)
    model.zero_grad()
    model.eval()
    with collect_losses(model) as losses:
        model(batch()).sum().backward()
    assert losses.load_balancing_loss > 0
    for a, b in zip(router_gradients(model), plain, strict=True):
        assert torch.equal(a, b)


def test_weight_zero_adds_nothing_and_still_reports():
    model = Model(loss_weight=0.0)
    model(batch()).sum().backward()
    plain = router_gradients(model)
    model.zero_grad()
    with collect_losses(model) as losses:
        model(batch()).sum().backward()
    assert losses.load_balancing_loss == 0
    assert len(losses.per_layer) == 3
    for a, b in zip(router_gradients(model), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sequence_scope_is_exact_however_the_batch_is_cut(parts):
    model, x = Model(balance_scope="sequence", loss_weight=1.0), batch()
    for part in x.chunk(parts):
        with collect_losses(model, share=1 / parts):
            model(part).square().sum().backward()
    got = router_gradients(model)
    model.zero_grad()
    with collect_losses(model):
        model(x).square().sum().backward()
    for a, b in zip(got, router_gradients(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_micro_scope_has_the_same_scale_when_cut():
    model, x = Model(loss_weight=1.0), batch(n=8, s=32)
    values = []
    for parts in (1, 4):
        collected = []
        for part in x.chunk(parts):
            with collect_losses(model, share=1 / parts) as losses:
                model(part)
            collected.append(losses.load_balancing_loss)
        values.append(torch.stack(collected).mean().item())
    assert values[1] == pytest.approx(values[0], rel=0.1)
    assert values[1] != values[0]  # bilinear: only the scale agrees


def test_global_scope_equals_the_joined_batch():
    model, x = Model(balance_scope="global", loss_weight=1.0), batch()
    counts: dict[str, torch.Tensor] = {}
    for part in x.chunk(2):
        with torch.no_grad(), collect_losses(model) as losses:
            model(part)
        for name, stats in losses.per_layer.items():
            counts[name] = counts.get(name, 0) + stats.tokens_per_expert_E
    values = []
    for part in x.chunk(2):
        with collect_losses(model, share=0.5, reduce_counts=lambda name, _counts: counts[name]) as losses:
            model(part).square().sum().backward()
        values.append(losses.load_balancing_loss)
    got = router_gradients(model)
    model.zero_grad()
    with collect_losses(model) as losses:
        model(x).square().sum().backward()
    assert sum(values) / 2 == pytest.approx(losses.load_balancing_loss.item(), rel=1e-9)
    for a, b in zip(got, router_gradients(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scope", ["micro", "sequence"])
@pytest.mark.parametrize("moe_type", ["dropless", "capacity"])
def test_padding_counts_in_nothing(scope, moe_type):
    model = Model(balance_scope=scope, z_loss_weight=0.1, moe_type=moe_type, capacity_factor=4.0)
    x = batch()
    with collect_losses(model) as want:
        out = model(x)
    padded = torch.cat([x, 100 * batch(seed=9)], dim=1)
    mask = torch.arange(12).expand(4, 12) < 6
    with collect_losses(model) as got:
        out_padded = model(padded, mask)
    torch.testing.assert_close(out_padded[:, :6], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.load_balancing_loss, want.load_balancing_loss)
    torch.testing.assert_close(got.z_loss, want.z_loss)
    for a, b in zip(got.per_layer.values(), want.per_layer.values(), strict=True):
        assert torch.equal(a.tokens_per_expert_E, b.tokens_per_expert_E)
        assert a.dropped == b.dropped == 0


def test_masked_tokens_leave_the_layer_as_zeros():
    moe = Model(shared_experts=1).layers[0]
    mask = torch.tensor([True, False, True])
    out = moe(batch(1, 3)[0], mask)
    assert torch.equal(out[1], torch.zeros(D, dtype=torch.double))
    assert (out[[0, 2]] != 0).all()


def test_two_forwards_in_one_collector_are_refused():
    model = Model()
    with collect_losses(model), pytest.raises(RuntimeError, match=r"layers\.0 ran twice"):
        model(batch())
        model(batch())


def test_another_models_layers_do_not_report():
    model, other = Model(), Model()
    with collect_losses(model) as losses:
        other(batch())
    assert losses.per_layer == {}


def test_evaluation_between_steps_leaves_nothing_behind():
    model = Model()
    for _ in range(2):
        with torch.no_grad(), collect_losses(model.eval()) as evaluated:
            model(batch(1, 5))
        with collect_losses(model.train()) as trained:
            model(batch()).sum().backward()
        assert evaluated.per_layer["layers.0"].tokens_per_expert_E.sum() == 5 * 2
        assert trained.per_layer["layers.0"].tokens_per_expert_E.sum() == 24 * 2


def test_bias_moves_against_the_load_and_stays_centred():
    model = Model(balance="bias", bias_update_rate=0.01)
    counts = {f"layers.{i}": torch.tensor([10, 5, 5, 0]) for i in (0, 2, 4)}
    update_expert_biases(model, counts)
    bias = model.layers[0].router.expert_bias
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.0, 0.0, 0.01], dtype=torch.double))
    update_expert_biases(model, {k: torch.tensor([20, 0, 0, 0]) for k in counts})
    assert bias.sum().abs() < 1e-12
    assert "layers.0.router.expert_bias" in model.state_dict()


def test_bias_balancing_has_no_auxiliary_loss():
    model = Model(balance="bias", loss_weight=1.0)
    with collect_losses(model) as losses:
        model(batch()).sum().backward()
    assert losses.load_balancing_loss == 0
