"""Schedule, optimizer groups, precision, averages, masking, epochs: small parts with values known in advance."""

import argparse
import math

import pytest
import torch
from torch import nn

from openlm_moe import UserError
from openlm_moe.hosts.builtin.averaging import Averager, make_averagers, parse_averager
from openlm_moe.hosts.builtin.lm_loss import summed_loss
from openlm_moe.hosts.builtin.optimizer import make_optimizer
from openlm_moe.hosts.builtin.plan import Plan
from openlm_moe.hosts.builtin.precision import LossScale, make_precision
from openlm_moe.hosts.builtin.prepare import check_batch_size
from openlm_moe.hosts.builtin.schedule import Schedule, make_schedule
from openlm_moe.hosts.builtin.targets import Masking, count_targets, make_example

CPU = torch.device("cpu")


def test_cosine_schedule():
    schedule = Schedule("cosine", lr=1.0, warmup=4, total_steps=12, end=0.2)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(4) == 1.0
    assert schedule(8) == pytest.approx(0.6)  # half way: the mean of both ends
    assert schedule(12) == pytest.approx(0.2)
    assert Schedule("cosine", 1.0, 4, 12, end=0.2, floor=0.7)(8) == 0.7


def test_constant_schedules():
    assert [Schedule("const", 2.0, 2, 10)(step) for step in (0, 1, 2, 9)] == [1.0, 2.0, 2.0, 2.0]
    assert [Schedule("flat", 2.0, 5, 10)(step) for step in (0, 9)] == [2.0, 2.0]
    cooldown = Schedule("const-cooldown", 1.0, 2, 10, end=0.2, cooldown_steps=4)
    assert [cooldown(step) for step in (1, 5, 6)] == [1.0, 1.0, 1.0]
    assert [cooldown(step) for step in (7, 8, 9, 10)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    squared = Schedule("const-cooldown", 1.0, 0, 10, end=0.0, cooldown_steps=4, power=2.0)
    assert squared(8) == pytest.approx(0.25)


def test_the_cooldown_covers_the_last_epochs():
    args = argparse.Namespace(
        skip_scheduler=False, lr_scheduler="const-cooldown", lr=1.0, warmup=0, lr_cooldown_end=0.0, force_min_lr=0.0
    )
    args.epochs, args.epochs_cooldown, args.lr_cooldown_power = 4, 1, 1.0
    schedule = make_schedule(args, 100)
    assert schedule(75) == 1.0 and schedule(80) == pytest.approx(0.8)


def test_matrices_decay_and_gains_do_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 6))
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))
    args = argparse.Namespace(wd=0.3, lr=1.0, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = make_optimizer(model, args)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(decays) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decays[id(parameter)] == (0.3 if parameter.dim() >= 2 else 0.0)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9) and optimizer.param_groups[0]["eps"] == 1e-6


def test_the_optimizer_refuses_half_weights():
    args = argparse.Namespace(wd=0.3, lr=1.0, beta1=0.8, beta2=0.9, eps=1e-6)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16; the optimizer needs fp32"):
        make_optimizer(nn.Linear(2, 2).bfloat16(), args)


def test_precision_names():
    assert make_precision(None, CPU).dtype is None
    assert make_precision(None, torch.device("cuda")).dtype is torch.bfloat16
    assert make_precision("amp", torch.device("cuda")).scaled and not make_precision("amp", CPU).scaled
    assert make_precision("amp_bf16", CPU).dtype is make_precision("amp_bfloat16", CPU).dtype is torch.bfloat16
    assert make_precision("fp32", torch.device("cuda")).compute_dtype is torch.float32


def test_loss_scale_halves_on_overflow_and_doubles_after_2000_good_steps():
    scale = LossScale(enabled=True)
    first = scale.scale
    scale.update(finite=False)
    assert scale.scale == first / 2 and scale.may_skip()
    for _ in range(2000):
        scale.update(finite=True)
    assert scale.scale == first
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([first])
    scale.unscale_([weight])
    assert weight.grad.item() == 1.0
    other = LossScale(enabled=True)
    other.load_state_dict(scale.state_dict())
    assert (other.scale, other.good_steps) == (scale.scale, scale.good_steps)
    for _ in range(40):
        scale.update(finite=False)
    assert not scale.may_skip()
    assert not LossScale(enabled=False).may_skip() and LossScale(enabled=False).scale == 1.0


def trajectory(averager: Averager, weight: nn.Parameter, values: list[float]) -> float:
    for value in values:
        weight.data.fill_(value)
        averager.step()
    return next(averager.weights.parameters()).item()


def test_averages_by_hand():
    values = [4.0, 8.0, 1.0]
    for name, wanted in (
        ("poly_0", sum(values) / 3),  # eta 0 is the plain mean
        ("poly_1", ((4 / 3 + 8 * 2 / 3) * 1 / 2) + 1 * 2 / 4),
        ("ema_0.5", (((2.0 + 4) / 2 + 8) / 2 + 1) / 2),
        ("ema_0.5_2", (2.0 + 8) / 2),  # every second step
    ):
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(2.0)
        assert trajectory(Averager(name, model), model.weight, values) == pytest.approx(wanted), name


def test_an_average_in_place_gives_the_weights_back():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    averager = Averager("ema_0.5", model)
    model.weight.data.fill_(4.0)
    averager.step()
    with averager.in_place():
        assert model.weight.item() == 3.0
    assert model.weight.item() == 4.0 and next(averager.weights.parameters()).item() == 3.0


def test_an_average_has_the_models_names_buffers_and_ties():
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("not_saved", torch.ones(1), persistent=False)
    average = Averager("ema_0.9", model).weights
    assert average.state_dict().keys() == model.state_dict().keys() == {"a.weight", "b.weight", "kept"}
    assert average.a.weight is average.b.weight and average.a.weight is not model.a.weight


@pytest.mark.parametrize("name", ["sma", "ema_x", "ema_2", "poly_1_0", "ema_0.9_1_1", "poly_-1"])
def test_averagers_that_do_not_exist(name):
    with pytest.raises(UserError, match=f"--averagers names '{name}'"):
        parse_averager(name)


def test_no_averager_is_none():
    assert make_averagers("none", nn.Linear(1, 1)) == make_averagers(None, nn.Linear(1, 1)) == []


# 9 marks, 0 pads; the last mark is the third token of the first sample and the fifth of the second.
TOKENS = torch.tensor([[1, 2, 9, 3, 4, 5, 0], [1, 9, 2, 3, 9, 4, 5]])


def test_targets_are_the_next_tokens():
    example = make_example(TOKENS, None, Masking())
    assert example.inputs.tolist() == TOKENS[:, :-1].tolist() and example.targets.tolist() == TOKENS[:, 1:].tolist()
    assert example.mask is None and count_targets(example) == 12


def test_padding_has_no_loss_and_is_not_routed():
    example = make_example(TOKENS, None, Masking(pad=0))
    assert example.targets[0].tolist() == [2, 9, 3, 4, 5, -100]
    assert example.mask.all()
    example = make_example(torch.tensor([[1, 2, 0, 0]]), None, Masking(pad=0))
    assert example.mask.tolist() == [[True, True, False]]
    assert example.targets.tolist() == [[2, -100, -100]]


def test_the_datas_own_mask_counts_too():
    mask = torch.tensor([[True, True, True, False]])
    example = make_example(torch.tensor([[1, 2, 3, 0]]), mask, Masking())
    assert example.mask.tolist() == [[True, True, True]]
    assert example.targets.tolist() == [[2, 3, -100]]


def test_no_loss_up_to_and_including_the_last_mark():
    example = make_example(TOKENS, None, Masking(left=9))
    assert example.targets.tolist() == [[-100, -100, 3, 4, 5, 0], [-100, -100, -100, -100, 4, 5]]


def test_marks_can_be_taken_out():
    example = make_example(TOKENS, None, Masking(left=9, pad=0, squash=True))
    assert example.inputs.tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 0, 0]]
    assert example.targets.tolist() == [[-100, 3, 4, 5, -100, -100], [-100, -100, 4, 5, -100, -100]]
    assert example.mask.tolist() == [[True] * 5 + [False], [True] * 4 + [False] * 2]


def test_padding_moves_with_what_follows_a_mark_that_is_taken_out():
    tokens, mask = torch.tensor([[1, 9, 2, 3, 0, 0]]), torch.tensor([[True] * 4 + [False] * 2])
    example = make_example(tokens, mask, Masking(left=9, pad=7, squash=True))
    assert example.inputs.tolist() == [[1, 2, 3, 7, 7]]
    assert example.targets.tolist() == [[2, 3, -100, -100, -100]]
    assert example.mask.tolist() == [[True] * 3 + [False] * 2]


def test_micro_batches_are_equal_and_in_order():
    example = make_example(torch.arange(24).view(6, 4), None, Masking(pad=99))
    parts = example.split(3)
    assert [part.inputs[0, 0].item() for part in parts] == [0, 8, 16]
    assert all(part.mask.shape == (2, 3) for part in parts)


def test_losses_are_sums_over_targets_that_count():
    logits = torch.zeros(1, 3, 4)
    logits[0, 2] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    loss = summed_loss(logits, torch.tensor([[1, -100, 3]]), with_z_loss=True)
    lse = math.log(sum(math.exp(v) for v in range(4)))
    assert loss.cross_entropy.item() == pytest.approx(math.log(4) + lse - 3)
    assert loss.z.item() == pytest.approx(math.log(4) ** 2 + lse**2)
    assert summed_loss(logits, torch.tensor([[1, -100, 3]])).z is None


def test_epochs_end_where_their_samples_do():
    plan = Plan(global_batch_size=8, seq_len=16, samples_per_epoch=20, epochs=3)
    assert plan.total_steps == 7  # 60 samples
    ends = {step: plan.epoch_ending_at(step) for step in range(1, 8)}
    assert ends == {1: None, 2: 1, 3: None, 4: None, 5: 2, 6: None, 7: 3}
    assert plan.tokens(7) == 7 * 8 * 16
    short = Plan(global_batch_size=8, seq_len=16, samples_per_epoch=2, epochs=9)
    assert [short.epoch_ending_at(step) for step in (1, 2)] == [7, 9]


def test_batches_that_cannot_be_split_evenly():
    check_batch_size(12, 2, 3)
    with pytest.raises(UserError, match="use 6 or 12"):
        check_batch_size(10, 2, 3)
    with pytest.raises(UserError, match=r"use 6$"):
        check_batch_size(4, 2, 3)
