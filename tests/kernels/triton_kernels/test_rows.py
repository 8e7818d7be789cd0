"""Gather, combine and the weights' gradient against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import ODD_SIZES, WITH_FIXTURES
from row_cases import Rows, check_long_sums, check_rows
from triton_cases import DEVICE, DTYPES

from openlm_moe_kernels import route_plan
from openlm_moe_kernels.gpu.rows import combine_topk, gather_rows

any_rows = given(
    case=st.builds(
        Rows,
        tokens=st.integers(0, 60),
        top_k=st.integers(1, 4),
        experts=st.integers(1, 5),
        dim=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
        dtype=st.sampled_from(DTYPES),
        transposed=st.booleans(),
    )
)


@settings(max_examples=25, derandomize=True, **WITH_FIXTURES)
@any_rows
def test_any_rows(case: Rows) -> None:
    check_rows(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400, **WITH_FIXTURES)
@any_rows
def test_any_rows_at_length(case: Rows) -> None:
    check_rows(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 1030])
def test_narrow_rows_and_rows_of_several_blocks(dim: int, dtype: torch.dtype, launches) -> None:
    check_rows(Rows(37, 2, 4, dim, dtype, transposed=dim == 1))
    del launches["_tile_map"]
    assert launches == {"_gather_rows": 2, "_combine_topk": 2, "_combine_topk_dweights": 1}


def test_rows_without_any_expert_are_zero() -> None:
    plan = route_plan(torch.full((9, 2), 3, device=DEVICE), 3)
    nan = torch.full((18, 5), float("nan"), device=DEVICE)
    assert gather_rows(nan[:9], plan, nan[:9, :2]).count_nonzero() == 0
    assert combine_topk(nan, nan[:9, :2], plan).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_combine_sums_in_float32(dtype: torch.dtype) -> None:
    check_long_sums(dtype)
