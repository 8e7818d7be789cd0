"""Every norm of open_lm against its formula, in fp64 and under autocast."""

from __future__ import annotations

import pytest
import torch

from openlm_moe import UserError
from openlm_moe.hosts.builtin.norms import make_norm
from openlm_moe.hosts.builtin.params import NORMS

DIM, EPS = 24, 1e-2  # a large eps, so that a norm that ignores it fails
GAIN = {"default_layer_norm", "lp_layer_norm", "gain_only_lp_layer_norm", "gain_only_layer_norm", "rms_norm"}
BIAS = {"default_layer_norm", "lp_layer_norm"}


def norm_with_random_parameters(kind: str) -> torch.nn.Module:
    norm = make_norm(kind, DIM, EPS)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=1.0)
    return norm


@pytest.mark.parametrize("kind", NORMS)
def test_formula(kind: str) -> None:
    norm = norm_with_random_parameters(kind).double()
    x = torch.randn(3, 5, DIM, dtype=torch.float64) * 0.3 + 0.7
    centred = x if kind == "rms_norm" else x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    if kind in GAIN:
        expected = expected * norm.weight
    if kind in BIAS:
        expected = expected + norm.bias
    assert (norm(x) - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("kind", NORMS)
def test_parameters(kind: str) -> None:
    names = {name for name, _ in make_norm(kind, DIM, EPS).named_parameters()}
    assert names == ({"weight"} if kind in GAIN else set()) | ({"bias"} if kind in BIAS else set())


@pytest.mark.parametrize("kind", NORMS)
def test_dtype_under_autocast(kind: str) -> None:
    norm, x = norm_with_random_parameters(kind), torch.randn(4, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    low_precision = kind in {"lp_layer_norm", "gain_only_lp_layer_norm"}
    assert out.dtype == (torch.bfloat16 if low_precision else torch.float32)
    assert (out.float() - norm(x)).norm() < (1e-2 if low_precision else 1e-6) * norm(x).norm()


def test_rms_norm_computes_in_fp32() -> None:
    norm = norm_with_random_parameters("rms_norm").to(torch.bfloat16)
    x = (torch.randn(4, DIM) * 1e-3).to(torch.bfloat16)
    exact = norm.double()(x.double())
    norm = norm.to(torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(norm(x), wide.to(torch.bfloat16) * norm.weight)
    assert (norm(x).double() - exact).norm() < 1e-2 * exact.norm()


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="batch_norm"):
        make_norm("batch_norm", DIM, EPS)
