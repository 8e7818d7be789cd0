"""The self-check passes on right kernels and catches wrong ones."""

import pytest
import torch

from openlm_moe_kernels import torch_backend
from openlm_moe_kernels.verify import KernelMismatch, require_verified, verify_expert_ffn

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def checks(dtype=torch.float32, activation="gelu", **more):
    settings = dict(top_k=2, activation=activation, dtype=dtype, device=CPU, backend="torch", **more)
    return verify_expert_ffn(40, 72, 8, **settings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_torch_backend_passes(dtype, activation):
    found = checks(dtype, activation)
    assert [c.name for c in found] == ["out", "dx", "dweights", "dw1", "dw2"]
    require_verified("layers.0", found, "torch")
    if dtype != torch.float64:
        assert any(c.error > 0 for c in found)  # it did compare two different computations


def last_column_not_written(out):
    out[:, -1] = 0


def one_row_too_few(out):
    out[-2] = 0  # the last row is the token that goes nowhere


def slightly_off(out):
    out *= 1.001


@pytest.mark.parametrize("damage", [last_column_not_written, one_row_too_few, slightly_off])
def test_a_wrong_forward_is_caught(damage, monkeypatch):
    forward = torch_backend.ffn_forward

    def wrong(*args, **kwargs):
        out, pre = forward(*args, **kwargs)
        damage(out)
        return out, pre

    monkeypatch.setattr(torch_backend, "ffn_forward", wrong)
    with pytest.raises(KernelMismatch, match=r"layers\.0: out computed by backend torch is off by"):
        require_verified("layers.0", checks(), "torch")


@pytest.mark.parametrize("which", range(4))
def test_a_wrong_gradient_is_caught(which, monkeypatch):
    backward = torch_backend.ffn_backward

    def wrong(*args, **kwargs):
        grads = list(backward(*args, **kwargs))
        grads[which] = grads[which] * 1.01
        return tuple(grads)

    monkeypatch.setattr(torch_backend, "ffn_backward", wrong)
    failed = [c.name for c in checks() if not c.passed]
    assert failed == [["dx", "dweights", "dw1", "dw2"][which]]


def test_a_gradient_in_an_empty_expert_is_caught(monkeypatch):
    backward = torch_backend.ffn_backward

    def wrong(*args, **kwargs):
        dx, dweights, dw1, dw2 = backward(*args, **kwargs)
        dw1[1, 0, 0] = 1e-6
        return dx, dweights, dw1, dw2

    monkeypatch.setattr(torch_backend, "ffn_backward", wrong)
    assert [c.name for c in checks() if not c.passed] == ["dw1"]


def test_nan_is_caught(monkeypatch):
    forward = torch_backend.ffn_forward

    def wrong(*args, **kwargs):
        out, pre = forward(*args, **kwargs)
        return out * float("nan"), pre

    monkeypatch.setattr(torch_backend, "ffn_forward", wrong)
    assert not checks()[0].passed


def test_a_single_expert():
    settings = dict(top_k=1, activation="gelu", dtype=torch.float32, device=CPU, backend="torch")
    require_verified("layers.0", verify_expert_ffn(16, 24, 1, **settings), "torch")
