"""The grouped GEMM against float64, for every shape it may meet."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_cases import (
    DEVICE,
    DTYPES,
    SMALL,
    Product,
    assert_close,
    check_product,
    ends,
    error,
    forced,
    poisoned,
    random,
)

from openlm_moe_kernels import reference
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.grouped_gemm import grouped_gemm

ODD_SIZES = (1, 7, 8, 17, 36, 63, 65, 96, 176)  # 176 is DeepSeek's 1408, an eighth of it
LAYOUTS = {
    "empty first": ((0, 5, 40), 3),
    "empty in the middle": ((33, 0, 0, 7), 0),
    "empty last": ((40, 1, 0), 0),
    "one row each": ((1, 1, 1, 1, 1), 0),
    "all rows in one group": ((0, 0, 70, 0), 0),
    "only the tail": ((0, 0), 37),
    "a long tail": ((3, 0, 4), 66),
    "around a tile": ((31, 32, 33, 0, 64), 1),
    "report A3": ((0, 1, 7, 8, 9), 5),
    "report A4, a tenth": ((16, 0, 258, 45, 0, 8), 0),
    "no rows": ((0, 0, 0), 0),
}

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


def run_any_product(case: Product, config: tables.Config) -> None:
    with forced(config):
        check_product(case)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=products, config=configs)
def test_any_product(case: Product, config: tables.Config) -> None:
    run_any_product(case, config)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=products, config=configs)
def test_any_product_at_length(case: Product, config: tables.Config) -> None:
    run_any_product(case, config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_group_layouts(layout: str, activation: str | None, launches) -> None:
    sizes, tail = LAYOUTS[layout]
    with forced(SMALL):
        check_product(Product(sizes, tail, 48, 40, activation=activation, scaled=activation is not None))
    assert launches["_grouped_gemm"] == (1 if sum(sizes) + tail else 0) or layout == "no rows"


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
    def test_few_tokens_per_expert_in_full(self) -> None:
        sizes = tuple(4 if expert % 5 == 0 else 3 for expert in range(160))
        assert sum(sizes) == 512
        x, w = (
            random(512, 4096, dtype=torch.bfloat16),
            torch.empty(160, 4096, 2048, dtype=torch.bfloat16, device=DEVICE),
        )
        offsets = ends(sizes)
        for expert in range(160):
            w[expert] = random(4096, 2048, dtype=torch.bfloat16, scale=1 / 64)
        y, _ = grouped_gemm(x, w, offsets)
        for expert, end in enumerate(offsets.tolist()):
            rows = slice(end - sizes[expert], end)
            assert error(y[rows], x[rows].float() @ w[expert].float()) < 4e-3

    def test_equals_jax_ragged_dot(self) -> None:
        jax = pytest.importorskip("jax", reason="jax is not installed: openlm-moe[test-full]")
        sizes = (1,) * 32
        x, w = random(32, 96, dtype=torch.float32), random(32, 96, 96, dtype=torch.float32)
        with forced(tables.Config(32, 64, 32, 4, 1)):
            y, _ = grouped_gemm(x, w, ends(sizes))
        theirs = jax.lax.ragged_dot(
            jax.numpy.asarray(x.cpu().numpy()),
            jax.numpy.asarray(w.cpu().numpy()),
            jax.numpy.asarray(sizes),
            precision=jax.lax.Precision.HIGHEST,
        )
        assert error(y.cpu(), torch.tensor(theirs.tolist())) < 1e-5


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


class TestBeyondInt32:
    """Element offsets past 2^31, in memory that is mostly never touched."""

    @pytest.fixture(autouse=True)
    def leave_memory_untouched(self, uninitialised_memory_is_nan) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = False

    def strided(self, t, stride: int):
        """`t` with its outermost stride replaced."""
        strides = (stride, *t.stride()[1:])
        size = (t.shape[0] - 1) * stride + t[0].numel()
        return torch.empty(size, dtype=t.dtype, device=DEVICE).as_strided(t.shape, strides).copy_(t)

    @pytest.mark.parametrize("tma", [False, True])
    def test_inputs(self, tma: bool) -> None:
        x, w = random(40, 32, dtype=torch.float16), random(3, 32, 48, dtype=torch.float16, scale=0.2)
        offsets = ends((10, 0, 28))
        expected = reference.grouped_gemm(x.double(), w.double(), offsets)
        far_x, far_w = self.strided(x, 2**26), self.strided(w, 2**30 + 64)
        assert 39 * far_x.stride(0) > 2**31 and 2 * far_w.stride(0) > 2**31
        with forced(tables.Config(32, 32, 32, 4, 1, tma=tma)):
            assert_close(grouped_gemm(far_x, w, offsets)[0], expected, torch.float16)
            assert_close(grouped_gemm(x, far_w, offsets)[0], expected, torch.float16)
            gathered, _ = grouped_gemm(far_x, w, offsets, gather=torch.arange(39, -1, -1, device=DEVICE))
            assert_close(gathered, reference.grouped_gemm(x.double().flip(0), w.double(), offsets), torch.float16)
            transposed = self.strided(x.T.contiguous(), 2**27).T  # the inner dimension is the far one
            assert_close(grouped_gemm(transposed, w, offsets)[0], expected, torch.float16)

    @pytest.mark.slow
    @pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
    def test_outputs(self, activation: str | None) -> None:
        """A single tile, named by a map of its own, at the end of outputs with more than 2^31 elements."""
        columns, rows, first = 1056, 2**21 + 40, 2**21 + 4
        assert first * columns > 2**31
        x = torch.empty(rows, 16, dtype=torch.float16, device=DEVICE)
        x[first:] = random(rows - first, 16, dtype=torch.float16)
        w = random(1, 16, columns * (2 if activation == "swiglu" else 1), dtype=torch.float16, scale=0.25)
        config = tables.Config(32, 256, 16, 4, 1)
        one_tile = torch.tensor([[1, 0, 0, 0], [0, first, first + 32, 0]], dtype=torch.int32, device=DEVICE)
        tiles = torch.empty(4 * rows // 32, 4, dtype=torch.int32, device=DEVICE)
        tiles[:2] = one_tile  # the section for 32 rows a tile is the first
        with forced(config):
            y, pre = grouped_gemm(x, w, ends((rows,)), activation=activation, keep_pre=bool(activation), tiles=tiles)
        expected_pre = x[first : first + 32].double() @ w[0].double()
        expected = reference.activate(expected_pre, activation)
        assert_close(y[first : first + 32], expected, torch.float16, 4.0)
        if pre is not None:
            assert_close(pre[first : first + 32], expected_pre, torch.float16)


def test_tf32_is_asked_for_by_name(monkeypatch) -> None:
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
