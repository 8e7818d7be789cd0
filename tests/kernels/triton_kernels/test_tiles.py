"""The tile map, made by the routing plan on the device, against a loop over the groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import GROUPS, WITH_FIXTURES
from triton_cases import DEVICE, check_tile_map

from openlm_moe_kernels import backend, route_plan
from openlm_moe_kernels.gpu.tiles import tile_map_shape


@settings(max_examples=40, derandomize=True, **WITH_FIXTURES)
@given(sizes=st.lists(st.integers(0, 150), min_size=1, max_size=9), tail=st.sampled_from((0, 1, 31, 32, 130)))
def test_any_sizes(sizes: Sequence[int], tail: int) -> None:
    check_tile_map(sizes, tail)


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups: str) -> None:
    check_tile_map(*GROUPS[groups])


def test_more_tiles_than_one_program_makes() -> None:
    check_tile_map([5, 0, 1] * 100, 70)


def test_a_plan_holds_its_map(launches) -> None:
    ids = torch.randint(0, 6, (50, 2), device=DEVICE)
    plan = route_plan(ids, 5)
    assert launches == {"_tile_map": 1}
    assert plan.tiles.shape == tile_map_shape(100, 5)
    assert torch.equal(plan.tiles, backend.load("triton").tile_map(plan.offsets_E, 100))
    assert torch.equal(plan.tiles, route_plan(ids, 5).tiles)
