"""The layer as a whole against a plain loop over experts, for every router option."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from openlm_moe import CapacityMoE, DroplessMoE, MoEConfig, build_moe, collect_losses
from openlm_moe.layers.capacity import drop_over_capacity, expert_capacity

D, HIDDEN, E = 10, 7, 5


def layer(**settings) -> DroplessMoE:
    moe = build_moe(D, 2, MoEConfig(**{"num_experts": E, "ffn_dim": HIDDEN, **settings})).double()
    moe.init_weights(seed=0)
    return moe


def tokens(n=23, seed=0):
    x = torch.randn(n, D, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def activate(hidden, ffn):
    if ffn == "gelu":
        return F.gelu(hidden, approximate="tanh")
    gate, up = hidden[:, : hidden.shape[1] // 2], hidden[:, hidden.shape[1] // 2 :]
    return F.silu(gate) * up


def loop(moe, x, experts_TK=None):
    """The definition: each token's weighted experts, one by one."""
    routing = moe.router(x)
    ids = routing.experts_TK if experts_TK is None else experts_TK
    rows = []
    for t in range(len(x)):
        row = torch.zeros(D, dtype=x.dtype)
        for k, expert in enumerate(ids[t].tolist()):
            if expert < moe.config.num_experts:
                hidden = activate(x[t : t + 1] @ moe.experts.w1[expert], moe.config.ffn)
                row = row + routing.weights_TK[t, k] * (hidden @ moe.experts.w2[expert])[0]
        rows.append(row)
    out = torch.stack(rows)
    return out if moe.shared is None else out + moe.shared(x)


OPTIONS = [
    dict(ffn=ffn, score=score, normalize_weights=normalize, top_k=top_k)
    for ffn, score, normalize, top_k in itertools.product(
        ("gelu", "swiglu"), ("softmax", "sigmoid"), (False, True), (1, 2, 5)
    )
] + [
    dict(shared_experts=2),
    dict(shared_experts=1, ffn="swiglu"),
    dict(uniform_routing=True),
    dict(balance="bias"),
    dict(num_experts=1, top_k=1),
]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_equals_a_loop_over_experts(settings, backend):
    moe, x = layer(backend=backend, **settings), tokens()
    out = moe(x)
    want = loop(moe, x)
    assert want.abs().max() > 1e-3
    assert (out - want).abs().max() <= 1e-12 * want.abs().max()
    upstream = torch.randn_like(out)
    leaves = [x, *moe.parameters()]
    got_grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    want_grads = torch.autograd.grad(want, leaves, upstream, allow_unused=True)
    for name, got, expected in zip(["x", *dict(moe.named_parameters())], got_grads, want_grads, strict=True):
        expected = torch.zeros_like(got) if expected is None else expected
        assert (got - expected).abs().max() <= 1e-12 * max(expected.abs().max(), 1), name


@pytest.mark.parametrize("settings", OPTIONS[::3] + OPTIONS[-5:], ids=str)
def test_gradcheck(settings):
    moe, x = layer(**settings), tokens(6)
    names, values = zip(*moe.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))

    # Steps of 1e-6 flip no selection here, so the piecewise-smooth function is smooth where it is checked.
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_an_expert_without_tokens_gets_an_exactly_zero_gradient():
    moe = layer(top_k=1)
    moe.router.weight.data.zero_()
    moe.router.weight.data[3] = 10.0
    moe(tokens().abs() + 1).square().sum().backward()
    for w in (moe.experts.w1, moe.experts.w2):
        assert w.grad is not None
        assert torch.equal(w.grad[[0, 1, 2, 4]], torch.zeros_like(w.grad[[0, 1, 2, 4]]))
        assert w.grad[3].abs().max() > 0


def test_the_routers_gradient_is_the_tasks_without_auxiliary_loss():
    moe = layer(loss_weight=0.0)
    moe(tokens()).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("shape", [(3, 5), (15,)])
def test_any_leading_shape(shape):
    moe, x = layer(), tokens(15).detach()
    torch.testing.assert_close(moe(x.view(*shape, D)).view(15, D), moe(x))


@pytest.mark.parametrize("settings", [{"shared_experts": 1}, {"moe_type": "capacity"}, {"score": "sigmoid"}])
def test_nan_in_padding_stays_there(settings):
    moe, x = layer(z_loss_weight=0.1, **settings), tokens().detach()
    x[3] = float("nan")
    x.requires_grad_()
    with collect_losses(moe) as losses:
        out = moe(x, torch.arange(len(x)) != 3)
        out.square().sum().backward()
    assert out.isfinite().all() and losses.load_balancing_loss.isfinite() and losses.z_loss.isfinite()
    assert all(p.grad.isfinite().all() for p in (x, *moe.parameters()))


def test_no_tokens():
    moe = layer()
    x = torch.zeros(0, D, dtype=torch.double, requires_grad=True)
    moe(x).sum().backward()
    assert torch.equal(moe.experts.w1.grad, torch.zeros_like(moe.experts.w1))


def test_two_passes_are_bitwise_equal():
    runs = []
    for _ in range(2):
        moe, x = layer().float(), tokens().detach().float().requires_grad_()
        out = moe(x)
        out.square().sum().backward()
        runs.append([out, x.grad, *(p.grad for p in moe.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_and_parameter_dtypes(dtype):
    moe, x = layer().float(), tokens().detach().float()
    want = loop(moe, x).detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = moe(x)
    assert out.dtype == dtype
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (out.float() - want).norm() <= bound * want.norm()
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in moe.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_input_of_another_dtype_than_the_weights_comes_back_in_its_own(dtype):
    moe, x = layer(shared_experts=1).float(), tokens().detach()
    out = moe(x.to(dtype))
    assert out.dtype == dtype
    assert (out - loop(moe.double(), x)).norm() <= 2e-2 * out.norm()


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(2, 3, D + 1), None, "x has shape"),
        (torch.zeros(D), None, "x has shape"),
        (torch.zeros(2, 3, D, dtype=torch.int64), None, "x has dtype torch.int64"),
        (torch.zeros(2, 3, D), torch.ones(3, 2, dtype=torch.bool), "mask has shape"),
        (torch.zeros(2, 3, D), torch.ones(2, 3, dtype=torch.int64), "mask has dtype torch.int64; expected torch.bool"),
    ],
)
def test_wrong_arguments_are_named(x, mask, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        layer().float()(x, mask)


class TestCapacity:
    def test_capacity_rounds_up(self):
        assert expert_capacity(torch.tensor(10), 4, 2, 1.25) == 7  # 1.25 * 20 / 4 = 6.25

    def test_first_choices_come_before_second_ones(self):
        experts = torch.tensor([[1, 0], [0, 1], [0, 2]])
        assert drop_over_capacity(experts, 3, torch.tensor(2)).tolist() == [[1, 3], [0, 1], [0, 2]]

    def test_masked_slots_take_no_room(self):
        experts = torch.tensor([[3, 3], [0, 1], [0, 1]])
        assert drop_over_capacity(experts, 3, torch.tensor(1)).tolist() == [[3, 3], [0, 1], [3, 3]]

    def test_padding_changes_nothing(self):
        moe, x = layer(moe_type="capacity", capacity_factor=0.5), tokens(8).detach()
        padded = torch.cat([x, tokens(24, seed=1).detach()])
        out = moe(padded, torch.arange(32) < 8)
        assert torch.equal(out[:8], moe(x))

    def test_equals_the_loop_over_admitted_slots_and_counts_the_rest(self):
        moe, x = layer(moe_type="capacity", capacity_factor=0.5), tokens()
        assert isinstance(moe, CapacityMoE)
        with collect_losses(moe) as losses:
            out = moe(x)
        admitted = moe.admit(moe.router(x).experts_TK)
        dropped = int((admitted == E).sum())
        assert 0 < dropped < 46
        want = loop(moe, x, admitted)
        assert (out - want).abs().max() <= 1e-12 * want.abs().max()
        (stats,) = losses.per_layer.values()
        assert stats.dropped == dropped
        assert stats.tokens_per_expert_E.sum() == 46  # the loss sees what was asked for, not what fitted

    def test_ample_capacity_equals_dropless(self):
        x = tokens()
        torch.testing.assert_close(layer(moe_type="capacity", capacity_factor=5.0)(x), layer()(x), rtol=0, atol=0)
