"""Inputs that show mistakes, and the comparisons, shared by the tests of this folder.

Shape letters: M rows, K inner dimension, N columns, E groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from openlm_moe_kernels import reference
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.grouped_gemm import grouped_gemm
from openlm_moe_kernels.gpu.tiles import section, tile_map
from openlm_moe_kernels.gpu.wgrad import wgrad

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")

# Largest ||out - ref|| / ||ref|| against float64 of one product whose result is rounded once. Rounding to nearest makes
# about 2^-25 (float32, and its sums), 2^-13 (float16) and 2^-10 (bfloat16) of it; an output of zeros makes 1.
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPES = tuple(BOUNDS)

SMALL = tables.Config(block_m=32, block_n=32, block_k=32, warps=4, stages=1)
FEW = tables.Config(block_m=32, block_n=64, block_k=64, warps=4, stages=1)  # each program costs the interpreter 1 ms


# Configurations for hypothesis: every option, small tiles.
configs = st.builds(
    tables.Config,
    block_m=st.sampled_from((32, 64)),
    block_n=st.sampled_from((16, 32, 64)),
    block_k=st.sampled_from((16, 32, 64)),
    warps=st.just(4),
    stages=st.just(1),
    group=st.sampled_from((1, 3, 8)),
    tma=st.booleans(),
    programs_per_sm=st.sampled_from((0, 1)),
)


def error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| of the whole and of its worst row, which counts as at least a mean row."""
    if out.numel() == 0:
        return 0.0
    difference = (out.double() - expected.double()).flatten(1) if out.dim() > 1 else out.double() - expected.double()
    rows = expected.double().flatten(1).norm(dim=1) if out.dim() > 1 else expected.double().abs()
    scale = rows.square().mean().sqrt()
    if scale == 0:
        return 0.0 if bool((difference == 0).all()) else float("inf")
    worst = difference.norm(dim=1) if out.dim() > 1 else difference.abs()
    return float((worst / rows.clamp(min=scale)).max())


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """`factor` counts the roundings and the sum lengths that a result has beyond a single product's."""
    assert out.shape == expected.shape
    found = error(out, expected)
    assert found <= factor * BOUNDS[dtype], f"relative error {found:.2e}, allowed {factor * BOUNDS[dtype]:.2e}"


def poisoned(t: Tensor, margin: int = 16) -> Tensor:
    """A copy of `t` inside a larger buffer of NaN: whatever is read beside it shows.

    The margin keeps rows at the 16 bytes that tensor descriptors and vector loads need.
    """
    shape = [n + 2 * margin if i >= t.dim() - 2 else n for i, n in enumerate(t.shape)]
    view = torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)
    for dim in range(max(0, t.dim() - 2), t.dim()):
        view = view.narrow(dim, margin, t.shape[dim])
    return view.copy_(t)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=torch.float64)).to(dtype).to(DEVICE)


def ends(sizes: Sequence[int]) -> Tensor:
    """Group sizes -> offsets."""
    return torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)


def forced(*configs: tables.Config) -> Any:
    """Every grouped GEMM and weight gradient takes the first of these, whatever its size."""
    entries = [
        tables.Entry(kernel, bits, tables.VARIANTS[kernel], config, aligned=False)
        for config in configs
        for kernel in tables.VARIANTS
        for bits in (16, 32)
    ]
    return tables.use(tables.Table("test", 1 << 30, tuple(entries)))


@dataclass(frozen=True)
class Product:
    """One grouped GEMM: group sizes, rows past them, inner dimension, columns, and how it is asked for."""

    sizes: tuple[int, ...]
    tail: int
    inner: int
    columns: int
    dtype: torch.dtype = torch.float32
    trans_w: bool = False
    gathered: bool = False
    activation: str | None = None
    scaled: bool = False
    keep_pre: bool = False

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


def check_product(case: Product, function: Callable[..., tuple[Tensor, Tensor | None]] = grouped_gemm) -> None:
    """Runs `function` on poisoned inputs and compares with float64, tail and pre-activation included."""
    experts, width = len(case.sizes), case.columns * (2 if case.activation == "swiglu" else 1)
    offsets, routed = ends(case.sizes), sum(case.sizes)
    x = poisoned(random(case.rows, case.inner, dtype=case.dtype))
    w = random(experts, case.inner, width, dtype=case.dtype, scale=case.inner**-0.5)
    w = poisoned(w.mT.contiguous()) if case.trans_w else poisoned(w)
    gather = torch.randperm(case.rows, device=DEVICE) if case.gathered else None
    scale = torch.rand(case.rows, device=DEVICE) + 0.5 if case.scaled else None
    # What is past the last offset must not matter, and 0 * NaN is NaN.
    x[gather[routed:] if gather is not None else slice(routed, None)] = float("nan")
    if scale is not None:
        scale[routed:] = float("nan")

    y, pre = function(
        x,
        w,
        offsets,
        trans_w=case.trans_w,
        gather=gather,
        activation=case.activation,
        row_scale=scale,
        keep_pre=case.keep_pre,
    )
    how = {"trans_w": case.trans_w, "gather": gather}
    expected_pre = reference.grouped_gemm(x.double(), w.double(), offsets, **how)
    # The kernel's activation takes the rounded pre-activation, as one that is stored and loaded again does.
    taken = expected_pre if case.activation is None else expected_pre.to(case.dtype).double()
    expected = reference.activate(taken, case.activation)
    if scale is not None:
        expected = expected * torch.where(torch.arange(case.rows, device=DEVICE) < routed, scale, 0.0)[:, None].double()
    factor = 1.0 if case.activation is None else 4.0
    assert_close(y, expected, case.dtype, factor)
    assert bool((y[routed:] == 0).all()), "rows past the last offset are not zero"
    assert (pre is not None) == case.keep_pre
    if pre is not None:
        assert_close(pre, expected_pre, case.dtype)


def check_wgrad(
    sizes: Sequence[int],
    tail: int,
    inner: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    gathered: str = "",
    out_dtype: torch.dtype | None = None,
    function: Callable[..., Tensor] = wgrad,
) -> None:
    """Runs `function` on poisoned inputs, adding to a strided buffer if `out_dtype`, and compares with float64."""
    rows, routed, offsets = sum(sizes) + tail, sum(sizes), ends(sizes)
    x, dy = (poisoned(random(rows, width, dtype=dtype)) for width in (inner, columns))
    order = torch.randperm(rows, device=DEVICE)
    gather = {"x": {"gather_x": order}, "dy": {"gather_dy": order}, "": {}}[gathered]
    for name, t in (("x", x), ("dy", dy)):
        t[order[routed:] if gathered == name else slice(routed, None)] = float("nan")
    out = before = None
    if out_dtype is not None:
        out = poisoned(random(len(sizes), inner, columns, dtype=out_dtype))
        before = out.double().clone()
    dw = function(x, dy, offsets, **gather, out=out)
    expected = reference.grouped_gemm_wgrad(
        x.double()[order] if gathered == "x" else x.double(),
        dy.double()[order] if gathered == "dy" else dy.double(),
        offsets,
    )
    assert out is None or dw is out
    assert_close(dw, expected if before is None else before + expected, out_dtype or dtype, 2.0)
    for group, size in enumerate(sizes):
        if size == 0:
            unchanged = torch.zeros_like(dw[group]) if before is None else before[group].to(dw.dtype)
            assert torch.equal(dw[group], unchanged), f"the gradient of the empty group {group} is not exactly zero"


def check_tile_map(sizes: Sequence[int], tail: int, function: Callable[[Tensor, int], Tensor] = tile_map) -> None:
    """Compares every section of `function`'s map with a loop over groups and tail."""
    offsets, rows = ends(sizes), sum(sizes) + tail
    tiles = function(offsets, rows)
    starts = [0, *offsets.tolist()]
    for block in tables.ROW_BLOCKS:
        expected = []
        for group, start, end in zip([*range(len(sizes)), -1], starts, [*starts[1:], rows], strict=True):
            expected += [[group, first, end, 0] for first in range(start, end, block)]
        count, *entries = section(tiles, rows, len(sizes), block).tolist()
        assert count == [len(expected), 0, 0, 0]
        unused = len(entries) - len(expected)
        assert unused >= 0, f"{len(expected)} tiles of {block} rows have room for {len(entries)}"
        assert entries == expected + [[-1, rows, rows, 0]] * unused
