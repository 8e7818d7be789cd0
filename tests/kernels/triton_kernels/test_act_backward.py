"""The activation's backward, fused with the scaling of rows and the combine weights' gradient, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import GROUPS, ODD_SIZES, WITH_FIXTURES
from row_cases import ActBackward, check_act_backward
from triton_cases import DEVICE, DTYPES, assert_close, ends

from openlm_moe_kernels import reference
from openlm_moe_kernels.gpu.activation import act_backward

ACTIVATIONS = ("gelu", "swiglu", None)
any_case = given(
    case=st.builds(
        ActBackward,
        sizes=st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=1, max_size=5).map(tuple),
        tail=st.sampled_from((0, 0, 1, 40)),
        hidden=st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80)),
        activation=st.sampled_from(ACTIVATIONS),
        dtype=st.sampled_from(DTYPES),
        scaled=st.booleans(),
        transposed=st.booleans(),
        overwrite_da=st.booleans(),
    )
)


@settings(max_examples=30, derandomize=True, **WITH_FIXTURES)
@any_case
def test_any_case(case: ActBackward) -> None:
    check_act_backward(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=500, **WITH_FIXTURES)
@any_case
def test_any_case_at_length(case: ActBackward) -> None:
    check_act_backward(case)


@pytest.mark.parametrize("groups", sorted(GROUPS.keys() - {"no rows"}))
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_groups(activation: str, groups: str, launches) -> None:
    sizes, tail = GROUPS[groups]
    check_act_backward(ActBackward(sizes, tail, 20, activation))
    assert launches == {"_act_backward": 1}


def test_no_rows(nothing_launched) -> None:
    check_act_backward(ActBackward(*GROUPS["no rows"], 20, "swiglu"))


def test_no_groups(nothing_launched) -> None:
    """There is no last offset to load: what lies before the buffer would decide."""
    check_act_backward(ActBackward((), 9, 20, "swiglu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_of_several_blocks(activation: str | None, dtype: torch.dtype) -> None:
    """1030 columns are a block and 6 more; `da` is overwritten as each block has been read."""
    case = ActBackward((3, 0, 6), 2, 1030, activation, dtype)
    for changes in ({}, {"overwrite_da": True}, {"scaled": False, "transposed": True}):
        check_act_backward(dataclasses.replace(case, **changes))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_large_pre_activations_have_finite_gradients(activation: str) -> None:
    """Where exp overflows, the activation is the identity or zero, and its slope 1 or 0."""
    pre = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]], device=DEVICE).repeat(1, 2)
    pre = pre[:, :6] if activation == "gelu" else pre
    da = torch.ones(1, 6, device=DEVICE)
    ours = act_backward(pre, da, ends((1,)), activation)
    exact = reference.act_backward(pre.double(), da.double(), ends((1,)), activation)
    for out, expected in zip(ours, exact, strict=True):
        assert_close(out, expected, torch.float32)
