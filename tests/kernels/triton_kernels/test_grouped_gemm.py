"""The grouped GEMM against float64, for every shape it may meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import GROUPS, ODD_SIZES, WITH_FIXTURES
from torch import Tensor
from triton_cases import (
    DEVICE,
    DTYPES,
    SMALL,
    Product,
    assert_close,
    check_product,
    configs,
    ends,
    forced,
    poisoned,
    random,
)

from openlm_moe_kernels import reference
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.grouped_gemm import grouped_gemm

products = st.builds(
    Product,
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=1, max_size=5).map(tuple),
    tail=st.sampled_from((0, 0, 1, 40)),
    inner=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
    columns=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
    dtype=st.sampled_from(DTYPES),
    trans_w=st.booleans(),
    gathered=st.booleans(),
    activation=st.sampled_from((None, "gelu", "swiglu")),
    scaled=st.booleans(),
)


def run_any_product(case: Product, config: tables.Config) -> None:
    with forced(config):
        check_product(case)


@settings(max_examples=25, derandomize=True, **WITH_FIXTURES)
@given(case=products, config=configs)
def test_any_product(case: Product, config: tables.Config) -> None:
    run_any_product(case, config)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400, **WITH_FIXTURES)
@given(case=products, config=configs)
def test_any_product_at_length(case: Product, config: tables.Config) -> None:
    run_any_product(case, config)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_groups(groups: str, activation: str | None, launches) -> None:
    sizes, tail = GROUPS[groups]
    with forced(SMALL):
        check_product(Product(sizes, tail, 48, 40, activation=activation, scaled=activation is not None))
    assert launches["_grouped_gemm"] == (1 if sum(sizes) + tail else 0) or groups == "no rows"


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("size", ODD_SIZES)
def test_odd_inner_and_outer_sizes(size: int, tma: bool, launches) -> None:
    other = ODD_SIZES[ODD_SIZES.index(size) - 4]
    with forced(tables.Config(32, 32, 64, 4, 1, tma=tma)):
        check_product(Product((9, 0, 2), 2, size, other))
        check_product(Product((9, 0, 2), 2, other, size, trans_w=True, activation="swiglu", keep_pre=True))
    assert launches["_grouped_gemm"] == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activation_epilogue_keeps_the_pre_activation(activation: str, dtype: torch.dtype) -> None:
    with forced(SMALL):
        check_product(Product((20, 0, 31), 4, 36, 33, dtype, activation=activation, gathered=True, keep_pre=True))


@pytest.mark.parametrize("programs_per_sm", [0, 1])
def test_tensor_descriptors_meet_every_edge(programs_per_sm: int, launches) -> None:
    """Aligned strides, but no size that a tile divides; the neighbours in the buffer are NaN."""
    with forced(tables.Config(32, 64, 32, 4, 1, tma=True, programs_per_sm=programs_per_sm)):
        for dtype in DTYPES:
            check_product(Product((33, 0, 5), 7, 40, 72, dtype))
            check_product(Product((33, 0, 5), 7, 40, 72, dtype, trans_w=True, gathered=True, activation="swiglu"))


class TestReportedCases:
    """MaxText's grouped GEMM was wrong where K is no multiple of the tile: by 16 in the first of these."""

    @pytest.mark.parametrize("tile", [(32, 32, 64), (32, 64, 32)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_token_per_expert(self, tile: tuple[int, int, int], dtype: torch.dtype) -> None:
        with forced(tables.Config(*tile, warps=4, stages=1)):
            check_product(Product((1,) * 32, 0, 96, 96, dtype))
            check_product(Product((1,) * 32, 0, 96, 96, dtype, trans_w=True))

    def test_few_tokens_per_expert(self) -> None:
        check_product(Product((3, 4, 3, 3, 4, 3, 3, 3), 0, 4096, 2048, torch.bfloat16))

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("oracle", ["matmul", "jax"])
    def test_few_tokens_per_expert_in_full(self, oracle: str) -> None:
        sizes = tuple(4 if expert % 5 == 0 else 3 for expert in range(160))
        assert sum(sizes) == 512
        multiply = matmul if oracle == "matmul" else ragged_dot()
        x = random(512, 4096, dtype=torch.bfloat16)
        w = torch.empty(160, 4096, 2048, dtype=torch.bfloat16, device=DEVICE)
        for expert in range(160):
            w[expert] = random(4096, 2048, dtype=torch.bfloat16, scale=1 / 64)
        y, _ = grouped_gemm(x, w, ends(sizes))
        starts = [0, *ends(sizes).tolist()]
        for first in range(0, 160, 20):  # all experts at once are 5 GB in float32
            some = slice(first, first + 20)
            rows = slice(starts[first], starts[first + 20])
            assert_close(y[rows], multiply(x[rows], w[some], sizes[some]), torch.bfloat16)

    @pytest.mark.parametrize(
        "case", [((1,) * 32, 96, 96), pytest.param(((3, 4, 3, 3, 4, 3, 3, 3), 4096, 2048), marks=pytest.mark.slow)]
    )
    def test_equals_jax_ragged_dot(self, case: tuple[tuple[int, ...], int, int]) -> None:
        sizes, inner, columns = case
        multiply = ragged_dot()
        x = random(sum(sizes), inner, dtype=torch.float32)
        w = random(len(sizes), inner, columns, dtype=torch.float32, scale=inner**-0.5)
        with forced(tables.Config(32, 64, 32, 4, 1) if inner == 96 else tables.Config(32, 256, 128, 4, 1)):
            y, _ = grouped_gemm(x, w, ends(sizes))
        assert_close(y, multiply(x, w, sizes), torch.float32, 2.0)  # both are rounded


def matmul(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.cat([rows.float() @ matrix.float() for rows, matrix in zip(x.split(sizes), w, strict=True)])


def ragged_dot() -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
    """`jax.lax.ragged_dot` on torch's tensors, in float32; skips the test where jax is not installed."""
    jax = pytest.importorskip("jax", reason="jax is not installed: openlm-moe[test-full]")

    def multiply(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
        arrays = (jax.numpy.asarray(t.float().cpu().numpy()) for t in (x, w))
        result = jax.lax.ragged_dot(*arrays, jax.numpy.asarray(sizes), precision=jax.lax.Precision.HIGHEST)
        return torch.from_numpy(result.__array__().copy()).to(x.device)

    return multiply


VIEWS = {
    "transposed x": lambda x, w: (x.T.contiguous().T, w),
    "every second row of x": lambda x, w: (x.repeat_interleave(2, 0)[::2], w),
    "every third column of x": lambda x, w: (x.repeat_interleave(3, 1)[:, ::3], w),
    "one row expanded": lambda x, w: (x[:1].expand_as(x), w),
    "columns of a wider w": lambda x, w: (x, torch.cat([w, w * 7], 2)[:, :, : w.shape[2]]),
    "w transposed in memory": lambda x, w: (x, w.mT.contiguous().mT),
    "experts last in memory": lambda x, w: (x, w.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    "one expert for all": lambda x, w: (x, w[:1].expand_as(w)),
    "an odd start": lambda x, w: (torch.cat([x.flatten(), x.flatten()[:3]])[3:].view_as(x), w),
}


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_their_contiguous_copies(view: str, tma: bool) -> None:
    x, w = VIEWS[view](random(40, 48, dtype=torch.bfloat16), random(3, 48, 32, dtype=torch.bfloat16))
    offsets = ends((17, 0, 20))
    with forced(tables.Config(32, 32, 32, 4, 1, tma=tma)):
        y, _ = grouped_gemm(x, w, offsets)
        copied, _ = grouped_gemm(x.contiguous(), w.contiguous(), offsets)
    assert torch.equal(y, copied)
    assert_close(y, reference.grouped_gemm(x.double(), w.double(), offsets), torch.bfloat16)


def test_tf32_is_asked_for_by_name(nothing_launched) -> None:
    """The interpreter computes either in full precision, so what counts is what the kernel is told."""
    from openlm_moe_kernels.gpu import launch

    told = []
    with launch.launcher(lambda inner: lambda kernel, grid, device, arguments: told.append(arguments["PRECISION"])):
        for dtype, allow_tf32 in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
            x, w = random(4, 16, dtype=dtype), random(1, 16, 16, dtype=dtype)
            tiles = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
            grouped_gemm(x, w, ends((4,)), allow_tf32=allow_tf32, tiles=tiles)
    assert told == ["ieee", "tf32", "ieee"]


def test_calls_are_bit_identical() -> None:
    x, w = poisoned(random(60, 40, dtype=torch.bfloat16)), random(3, 40, 36, dtype=torch.bfloat16)
    first, second = (grouped_gemm(x, w, ends((20, 0, 33)))[0] for _ in range(2))
    assert torch.equal(first, second)
