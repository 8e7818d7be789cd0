"""The products of a MoE layer one by one, with operands, and with a check against the reference.

Shape letters: T tokens, D model dim, F expert hidden dim, E experts; M rows, K inner dimension, N columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from openlm_moe.bench.contenders import routing
from openlm_moe.bench.shapes import Shape
from openlm_moe_kernels import reference, route_plan, triton_backend
from openlm_moe_kernels.gpu import grouped_gemm, tables
from openlm_moe_kernels.verify import BOUNDS


@dataclass(frozen=True)
class Product:
    """One grouped product as the layer launches it: (M, K) by (E, K, N), or for a weight gradient (K, M) by (M, N)."""

    layer: Shape
    kernel: str  # as in a kernel table
    variant: str
    inner: int
    columns: int
    dtype: torch.dtype
    gathered: bool = False
    transposed: bool = False  # the weights; for a weight gradient, the operand that is gathered is the second

    def entry(self, table: tables.Table) -> tables.Entry:
        """The entry of `table` that serves this product."""
        aligned = self.inner % 16 == self.columns % 16 == 0
        mean_rows = self.layer.rows // self.layer.experts
        return table.entry(self.kernel, 8 * self.dtype.itemsize, self.variant, mean_rows, self.columns, aligned)


def products(layer: Shape, dtype: torch.dtype) -> list[Product]:
    """The products of a layer's forward and backward, and a weight gradient that is added to a buffer."""
    dim, hidden, width = layer.dim, layer.hidden, layer.width
    gemm, wgrad = "grouped_gemm", "wgrad"
    return [
        Product(layer, gemm, layer.activation, dim, hidden, dtype, gathered=True),
        Product(layer, gemm, "none", hidden, dim, dtype),
        Product(layer, gemm, "none", dim, hidden, dtype, gathered=True, transposed=True),
        Product(layer, gemm, "none", width, dim, dtype, transposed=True),
        Product(layer, wgrad, "store", dim, width, dtype, gathered=True),
        Product(layer, wgrad, "store", hidden, dim, dtype, gathered=True, transposed=True),
        Product(layer, wgrad, "add", dim, width, dtype, gathered=True),
    ]


@dataclass(frozen=True)
class Case:
    """A product with operands: `run` launches it with balanced groups, `error` on uneven ones against the reference."""

    run: Callable[[], object]
    error: Callable[[], float]
    bound: float


def build(product: Product, device: str) -> Case:
    """Operands on `device`. The reference result is computed here, once, whatever is compared with it."""
    torch.manual_seed(0)
    layer = product.layer
    plan = route_plan(routing(layer, "balanced", device)[1], layer.experts)
    uneven = uneven_offsets(layer.rows, layer.experts).to(device)
    make = _wgrad if product.kernel == "wgrad" else _gemm
    launch, refer = make(product, plan.tokens_N if product.gathered else None, device)
    tiles = {offsets: triton_backend.tile_map(offsets, layer.rows) for offsets in (plan.offsets_E, uneven)}
    expected = refer(uneven)

    def error() -> float:
        with _uninitialised_is_nan():
            got = launch(uneven, tiles[uneven])
        return max_error(got, expected)

    return Case(lambda: launch(plan.offsets_E, tiles[plan.offsets_E]), error, BOUNDS[product.dtype])


Launch = Callable[[Tensor, Tensor], list[Tensor]]
Refer = Callable[[Tensor], list[Tensor]]


def _normal(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype) * scale


def _gemm(product: Product, gather: Tensor | None, device: str) -> tuple[Launch, Refer]:
    layer, how = product.layer, {"dtype": product.dtype, "device": device}
    width = product.columns * (2 if product.variant == "swiglu" else 1)
    matrix = (width, product.inner) if product.transposed else (product.inner, width)
    x = _normal(layer.rows if gather is None else layer.tokens, product.inner, **how)
    w = _normal(layer.experts, *matrix, **how, scale=product.inner**-0.5)
    activation = None if product.variant == "none" else product.variant
    asked = {"trans_w": product.transposed, "gather": gather}

    def launch(offsets: Tensor, tiles: Tensor) -> list[Tensor]:
        keep = activation is not None
        y, pre = grouped_gemm.grouped_gemm(x, w, offsets, **asked, activation=activation, keep_pre=keep, tiles=tiles)
        return [y] if pre is None else [y, pre]

    def refer(offsets: Tensor) -> list[Tensor]:
        pre = [] if activation is None else [reference.grouped_gemm(x, w, offsets, **asked)]
        y = reference.grouped_gemm(x, w, offsets, **asked, activation=activation)
        return [y, *pre]

    return launch, refer


def _wgrad(product: Product, gather: Tensor | None, device: str) -> tuple[Launch, Refer]:
    layer, how = product.layer, {"dtype": product.dtype, "device": device}
    gathered, straight = product.inner, product.columns
    if product.transposed:
        gathered, straight = straight, gathered
    x = _normal(layer.rows if gather is None else layer.tokens, gathered, **how)
    dy = _normal(layer.rows, straight, **how)
    asked = {"trans_w": product.transposed, "gather": gather}

    def buffer() -> Tensor | None:
        shape = (layer.experts, product.inner, product.columns)
        return torch.ones(shape, device=device) if product.variant == "add" else None

    reused = buffer()

    def launch(offsets: Tensor, tiles: Tensor) -> list[Tensor]:
        if reused is not None:
            reused.fill_(1.0)
        return [triton_backend.grouped_gemm_wgrad(x, dy, offsets, **asked, out=reused)]

    def refer(offsets: Tensor) -> list[Tensor]:
        return [reference.grouped_gemm_wgrad(x, dy, offsets, **asked, out=buffer())]

    return launch, refer


def uneven_offsets(rows: int, groups: int) -> Tensor:
    """Group ends, int32 (groups,): the second group empty, sizes from few rows to many, and a tail in no group."""
    weights = torch.linspace(0.1, 2.0, groups)
    if groups > 1:
        weights[1] = 0
    used = rows - min(5, rows // 8)
    return (weights.cumsum(0) / weights.sum() * used).round().to(torch.int32)


def max_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative error of any row and any column, each counted as at least a mean one; NaN where one is NaN.

    Infinite where a matrix or a row that must be zero, such as an empty group's, is not.
    """
    errors = []
    for out, want in zip(got, expected, strict=True):
        out, want = out.flatten(0, -2), want.flatten(0, -2)
        difference = out.float() - want.float()
        for dim in (0, 1):
            size = want.float().norm(dim=dim)
            relative = difference.norm(dim=dim) / size.clamp(min=float(size.square().mean().sqrt()))
            not_zero = (want == 0).all(dim) & (out != 0).any(dim)
            errors.append(torch.where(not_zero, torch.inf, relative).max())
    return float(torch.stack(errors).max())


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """What a kernel does not write is NaN, and not what an earlier and better launch left there."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
