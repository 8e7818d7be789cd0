"""The weight gradient of the grouped GEMM against float64, for every shape it may meet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import GROUPS, ODD_SIZES, WITH_FIXTURES
from triton_cases import DEVICE, DTYPES, SMALL, assert_close, check_wgrad, configs, ends, forced, poisoned, random

from openlm_moe_kernels import reference
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.wgrad import wgrad

any_gradient = given(
    config=configs,
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=1, max_size=5),
    tail=st.sampled_from((0, 0, 1, 40)),
    inner=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
    columns=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
    dtype=st.sampled_from(DTYPES),
    gathered=st.sampled_from(("", "x", "dy")),
    added=st.sampled_from((None, "float32", "the inputs'")),
)


def run_any_gradient(config: tables.Config, dtype: torch.dtype, added: str | None, **case) -> None:
    out_dtype = {None: None, "float32": torch.float32, "the inputs'": dtype}[added]
    with forced(config):
        check_wgrad(**case, dtype=dtype, out_dtype=out_dtype)


@settings(max_examples=30, derandomize=True, **WITH_FIXTURES)
@any_gradient
def test_any_gradient(**case) -> None:
    run_any_gradient(**case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400, **WITH_FIXTURES)
@any_gradient
def test_any_gradient_at_length(**case) -> None:
    run_any_gradient(**case)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["stored", "added"])
def test_groups(groups: str, out_dtype: torch.dtype | None, launches) -> None:
    sizes, tail = GROUPS[groups]
    with forced(SMALL):
        check_wgrad(sizes, tail, 48, 40, torch.bfloat16, out_dtype=out_dtype)
    assert launches == {"_wgrad": 1}


@pytest.mark.parametrize("programs_per_sm", [0, 1])
@pytest.mark.parametrize("size", ODD_SIZES)
def test_odd_sizes(size: int, programs_per_sm: int) -> None:
    other = ODD_SIZES[ODD_SIZES.index(size) - 4]
    with forced(tables.Config(32, 32, 64, 4, 1, programs_per_sm=programs_per_sm)):
        check_wgrad((9, 0, 34), 2, size, other)
        check_wgrad((9, 0, 34), 2, other, size, gathered="dy", out_dtype=torch.float32)


@pytest.mark.parametrize("tile", [(32, 32, 64), (32, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reported_case_of_one_token_per_expert(tile: tuple[int, int, int], dtype: torch.dtype) -> None:
    with forced(tables.Config(*tile, warps=4, stages=1)):
        check_wgrad((1,) * 32, 0, 96, 96, dtype)


@pytest.mark.parametrize("sizes", [(3, 4), pytest.param((3, 4, 3, 3, 4, 3, 3, 3), marks=pytest.mark.slow)], ids=len)
def test_reported_case_of_few_tokens_per_expert(sizes: tuple[int, ...]) -> None:
    check_wgrad(sizes, 0, 4096, 2048, torch.bfloat16)


VIEWS = {
    "columns first": lambda t: t.T.contiguous().T,
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every third column": lambda t: t.repeat_interleave(3, 1)[:, ::3],
    "one row expanded": lambda t: t[:1].expand_as(t),
    "an odd start": lambda t: torch.cat([t.flatten(), t.flatten()[:3]])[3:].view_as(t),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_their_contiguous_copies(view: str) -> None:
    x, dy = (VIEWS[view](random(60, width, dtype=torch.bfloat16)) for width in (48, 40))
    offsets = ends((17, 0, 40))
    with forced(SMALL):
        dw, copied = wgrad(x, dy, offsets), wgrad(x.contiguous(), dy.contiguous(), offsets)
    assert torch.equal(dw, copied)
    assert_close(dw, reference.grouped_gemm_wgrad(x.double(), dy.double(), offsets), torch.bfloat16, 2.0)


BUFFERS = {
    "transposed": lambda shape: torch.zeros(shape[0], shape[2], shape[1], device=DEVICE).mT,
    "experts last": lambda shape: torch.zeros(*shape[1:], shape[0], device=DEVICE).permute(2, 0, 1),
    "every second column": lambda shape: torch.zeros(*shape[:2], 2 * shape[2], device=DEVICE)[:, :, ::2],
}


@pytest.mark.parametrize("buffer", BUFFERS)
def test_adds_to_a_view(buffer: str) -> None:
    x, dy, offsets = random(60, 48, dtype=torch.float16), random(60, 40, dtype=torch.float16), ends((17, 0, 40))
    out = BUFFERS[buffer]((3, 48, 40)).fill_(2.0)
    expected = 2 + 2 * reference.grouped_gemm_wgrad(x.double(), dy.double(), offsets)
    with forced(SMALL):
        for _ in range(2):
            assert wgrad(x, dy, offsets, out=out) is out
    assert_close(out, expected, torch.float32, 2.0)
    assert bool((out[1] == 2).all())
    if buffer == "every second column":
        assert out._base.count_nonzero() == out.numel()  # the columns between are as they were


def test_sums_over_many_rows_are_float32() -> None:
    """4096 + 1 is 4096 in bfloat16: a sum rounded on the way stays there."""
    ones = torch.ones(5000, 16, dtype=torch.bfloat16, device=DEVICE)
    with forced(tables.Config(128, 16, 16, 4, 1)):
        dw = wgrad(ones, ones, ends((5000,)), out=torch.zeros(1, 16, 16, device=DEVICE))
    assert bool((dw == 5000).all())


def test_calls_are_bit_identical() -> None:
    x, dy = (poisoned(random(60, width, dtype=torch.bfloat16)) for width in (40, 36))
    first, second = (wgrad(x, dy, ends((20, 0, 33))) for _ in range(2))
    assert torch.equal(first, second)


def test_tf32_is_asked_for_by_name(nothing_launched) -> None:
    from openlm_moe_kernels.gpu import launch

    told: list[str] = []
    asked: Sequence[tuple[torch.dtype, bool]] = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True))
    with launch.launcher(lambda inner: lambda kernel, grid, device, arguments: told.append(arguments["PRECISION"])):
        for dtype, allow_tf32 in asked:
            x = random(4, 16, dtype=dtype)
            wgrad(x, x, ends((4,)), allow_tf32=allow_tf32)
    assert told == ["ieee", "tf32", "ieee"]
