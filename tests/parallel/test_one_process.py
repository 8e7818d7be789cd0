"""What the distributed parts do in a process on its own."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from openlm_moe import MoEConfig, UserError, build_moe
from openlm_moe.parallel import (
    StopRequest,
    apply_fsdp,
    check_plan,
    clip_grad_norm_,
    gradient_sync,
    make_layout,
    parallelize,
)
from openlm_moe.parallel.check import PlanError

CPU = torch.device("cpu")


def with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(3, 4, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))]
    parameters[0].grad, parameters[1].grad = torch.full((3, 4), 2.0, dtype=dtype), torch.full((2,), 4.0, dtype=dtype)
    return [*parameters, nn.Parameter(torch.zeros(1))]  # one without a gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clip(dtype):
    parameters = with_gradients(dtype)
    norm = clip_grad_norm_(parameters, 4.0)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(80**0.5, rel=1e-6)
    assert float(parameters[1].grad[0]) == pytest.approx(4 * 4 / 80**0.5, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_clip_leaves_small_gradients():
    parameters = with_gradients(torch.float32)
    assert float(clip_grad_norm_(parameters, 100.0)) == pytest.approx(80**0.5)
    assert float(parameters[1].grad[0]) == 4.0
    assert float(clip_grad_norm_(parameters, None)) == pytest.approx(80**0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_clip_reports_what_is_not_finite_and_leaves_the_rest(value):
    parameters = with_gradients(torch.float32)
    parameters[0].grad[0, 0] = value
    assert not torch.isfinite(clip_grad_norm_(parameters, 1.0))
    assert float(parameters[1].grad[0]) == 4.0


def test_clip_without_gradients():
    assert float(clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)) == 0.0


def test_clip_does_not_overflow_low_precision():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert float(clip_grad_norm_([parameter], None)) == pytest.approx(1.2e5, rel=1e-3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_by_signal(tmp_path, number):
    before = signal.getsignal(number)
    stop = StopRequest(tmp_path / "STOP")
    assert not stop.agreed()
    os.kill(os.getpid(), number)
    assert stop.agreed()
    stop.close()
    assert signal.getsignal(number) is before


def test_stop_by_file(tmp_path):
    stop = StopRequest(tmp_path / "STOP")
    assert not stop.agreed()
    stop.file.touch()
    assert stop.agreed()
    stop.close()
    assert not stop.file.exists(), "the next start must not be stopped by it"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe, self.head = (
            nn.Embedding(5, 8),
            build_moe(8, 0, MoEConfig(num_experts=2, ffn_dim=8)),
            nn.Linear(8, 5),
        )

    def forward(self, tokens):
        return self.head(self.moe(self.embed(tokens)))


def test_nothing_changes_without_a_process_group():
    layout = make_layout(False, False, "auto", 2, CPU)
    model = Tiny()
    before = list(model.parameters())
    assert parallelize(model, layout) is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    with gradient_sync(model, last=False):
        pass
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    check_plan(model)
    assert all(p.grad is None for p in model.parameters())


def test_a_low_precision_router_is_refused():
    model = Tiny()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.moe.router.bfloat16()
    with pytest.raises(PlanError, match=r"moe\.router computes in bfloat16"):
        check_plan(model)


def test_precision_names():
    with pytest.raises(UserError, match="it must be one of fp32, amp, pure_bf16"):
        apply_fsdp(Tiny(), make_layout(False, False, "off", 2, CPU), precision="half")
