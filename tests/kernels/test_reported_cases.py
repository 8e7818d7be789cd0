"""Shapes for which a public report found a grouped GEMM wrong: MegaBlox, where K is no multiple of the tile."""

from __future__ import annotations

import pytest
import torch
from moe_cases import BACKENDS, assert_close, ends, loop_products
from torch import Tensor

from openlm_moe_kernels import grouped_gemm


def operands(rows: list[int], inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(sum(rows), inner), torch.randn(len(rows), inner, columns), ends(tuple(rows))


def three_or_four(rows: int, experts: int) -> list[int]:
    """As in the report: 512 rows over 160 experts are 3 or 4 each."""
    return [rows // experts + (e < rows % experts) for e in range(experts)]


CASES = {
    "M=32, K=N=96, E=32, one row each": ([1] * 32, 96, 96),
    "M=28, K=4096, N=2048, E=8, 3 or 4 rows each": (three_or_four(28, 8), 4096, 2048),
    "M=512, K=4096, N=2048, E=160, 3 or 4 rows each": (three_or_four(512, 160), 4096, 2048),
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if "E=160" in name else []) for name in CASES]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_against_the_loop(name: str, backend: str) -> None:
    rows, inner, columns = CASES[name]
    x, w, offsets = operands(rows, inner, columns)
    got = grouped_gemm(x, w, offsets, backend=backend)
    want = torch.cat([x_e.double() @ w_e.double() for x_e, w_e in zip(x.split(rows), w, strict=True)])
    assert_close(name, got, want, torch.float32)
    assert (got - want).abs().max() < 1e-4 * inner**0.5  # the report's kernel was off by 16


@pytest.mark.parametrize("name", NAMES)
def test_against_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    rows, inner, columns = CASES[name]
    x, w, offsets = operands(rows, inner, columns)
    with jax.default_matmul_precision("highest"):
        want = jax.lax.ragged_dot(x.numpy(), w.numpy(), torch.tensor(rows, dtype=torch.int32).numpy())
    assert_close(name, grouped_gemm(x, w, offsets), torch.from_numpy(want.__array__().copy()), torch.float32)


def test_the_loop_oracle_is_right() -> None:
    x, w, _ = operands([1, 2], 3, 4)
    want = torch.stack([x[0] @ w[0], x[1] @ w[1], x[2] @ w[1]])
    torch.testing.assert_close(loop_products(x, w, (1, 2), 0), want)
