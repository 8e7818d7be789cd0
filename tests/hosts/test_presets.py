"""Every preset loads, says the truth in its first lines, fits its GPUs, and trains a step at toy width."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.args import parse_args
from openlm_moe.hosts.builtin.build import build_model
from openlm_moe.hosts.builtin.config_file import presets
from openlm_moe.hosts.builtin.count import count_parameters, short_count
from openlm_moe.hosts.builtin.optimizer import make_optimizer
from openlm_moe.hosts.builtin.params import ModelParams, load_model
from openlm_moe.hosts.builtin.precision import LossScale, make_precision
from openlm_moe.hosts.builtin.schedule import make_schedule, set_lr
from openlm_moe.hosts.builtin.step import StepRules, train_step
from openlm_moe.hosts.builtin.targets import Example
from openlm_moe.parallel import make_layout, shutdown
from openlm_moe.plan.command import gpu_from, job_from, parse
from openlm_moe.plan.memory import available, estimate_memory
from openlm_moe.telemetry.meters import StepMeter

NAMES = sorted(presets())
# Nodes of the published runs, and ours for the larger models.
NODES = {"41m": 1, "87m": 1, "160m": 1, "410m": 2, "830m": 4, "1b": 8, "3b": 16, "7b": 32}
GIB = 2**30


def read(name: str) -> tuple[argparse.Namespace, ModelParams, MoEConfig]:
    args = parse_args(["--config", name, "--dataset-manifest", "manifest.jsonl"])
    return args, *load_model(args.model, vars(args), args.moe)


def test_all_are_there() -> None:
    sizes = [f"open_lm_{size}_e{experts}" for size in list(NODES)[:5] for experts in (8, 32)]
    assert sorted([*sizes, "open_lm_1b_e8", "open_lm_3b_e8", "open_lm_7b_e8"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_header_is_true(name: str) -> None:
    _, size, experts = re.fullmatch(r"(open_lm)_(\w+)_e(\d+)", name).groups()
    args, params, moe = read(name)
    assert args.model == f"open_lm_{size}" and moe.num_experts == int(experts) and moe.every == 2
    assert params.model_norm == "gain_only_layer_norm"
    first, second, third, *_ = presets()[name].read_text().splitlines()
    count = count_parameters(params, moe)
    assert first == (
        f"# open_lm {size} with {experts} experts in every other layer: "
        f"{short_count(count.total)} parameters, {short_count(count.active)} active."
    )

    asked = parse(["--config", name])
    job, gpu = job_from(asked), gpu_from(asked)
    nodes = NODES[size]
    assert (job.gpus, job.nodes) == (8 * nodes, nodes)
    assert second == f"# gpus: {job.gpus} x {gpu.name} ({nodes} node{'s' * (nodes > 1)} of 8)"

    memory = estimate_memory(job)
    assert memory.fits(gpu) and memory.fits(gpu, worst=True)
    worst = f", {memory.peak(worst=True) / GIB:.0f} under the worst routing" if job.expert_parallel > 1 else ""
    said = f"# plan: fits, {memory.peak() / GIB:.0f} of {available(gpu) / GIB:.0f} GiB a GPU{worst}; "
    assert third == f"{said}python -m openlm_moe.plan --config {name}"


@pytest.fixture
def leave_no_process_group() -> Iterator[None]:
    yield
    shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_one_step_at_toy_width(name: str, leave_no_process_group: None) -> None:
    args, params, moe = read(name)
    params = replace(params, dim=4 * params.n_heads, vocab_size=31, seq_len=8, n_layers=4)
    device = torch.device("cpu")
    layout = make_layout(args.fsdp, args.fsdp_hybrid, args.expert_parallel, moe.num_experts, device)
    model = build_model(params, moe, args, layout)
    optimizer = make_optimizer(model, args)
    steps = args.train_num_samples * args.epochs // (args.global_batch_size * 2048)
    schedule = make_schedule(args, steps)
    assert schedule(0) == pytest.approx(args.lr / args.warmup) and schedule(args.warmup) == pytest.approx(args.lr)
    assert schedule(steps - 1) == pytest.approx(args.lr_cooldown_end, rel=0.01)
    set_lr(optimizer, schedule(0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tokens = torch.randint(0, 31, (args.accum_freq, 9))
    rules = StepRules(moe, args.accum_freq, args.grad_clip_norm, args.z_loss_coefficient, 0, 0, 1, counts_vary=False)
    result = train_step(
        model,
        optimizer,
        Example(tokens[:, :-1], tokens[:, 1:], None),
        0,
        rules,
        make_precision(args.precision, device),
        LossScale(False),
        StepMeter(),
    )
    assert result.loss == pytest.approx(math.log(31), rel=0.3)
    assert result.load_balancing_loss >= 0.1 * (1 - 1e-5)
    assert sum(int(counts.sum()) for counts in result.tokens_per_expert.values()) == 2 * 2 * 8 * args.accum_freq
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(changed)
