"""The routing plan: a stable sort by expert, said in five tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openlm_moe_kernels import route_plan, routing


def test_known_plan() -> None:
    plan = route_plan(torch.tensor([[2, 0], [0, 3], [2, 4]]), 4)  # 4 is no expert
    assert plan.counts_E.tolist() == [2, 0, 2, 1]
    assert plan.offsets_E.tolist() == [2, 2, 4, 5]
    assert plan.order_N.tolist() == [1, 2, 0, 4, 3, 5]
    assert plan.inverse_N.tolist() == [2, 0, 1, 4, 3, 5]
    assert plan.tokens_N.tolist() == [0, 1, 0, 2, 1, 2]
    assert (plan.top_k, plan.num_rows, plan.num_tokens, plan.num_experts) == (2, 6, 3, 4)
    assert plan.tiles.numel() == 0
    dtypes = [t.dtype for t in plan.tensors()]
    assert dtypes == [torch.int32, torch.int32, torch.int64, torch.int64, torch.int64, torch.int32]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    ids=st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(st.integers(0, 9), min_size=k, max_size=k), max_size=30)),
    num_experts=st.integers(1, 8),
    dtype=st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8)),
)
def test_any_ids(ids: list[list[int]], num_experts: int, dtype: torch.dtype) -> None:
    top_k = len(ids[0]) if ids else 1
    plan = route_plan(torch.tensor(ids, dtype=dtype).reshape(len(ids), top_k), num_experts)
    flat = [i for row in ids for i in row]
    assert plan.counts_E.tolist() == [flat.count(e) for e in range(num_experts)]
    assert plan.offsets_E.tolist() == [sum(i <= e for i in flat) for e in range(num_experts)]
    assert plan.order_N.tolist() == sorted(range(len(flat)), key=lambda slot: (min(flat[slot], num_experts), slot))
    assert plan.order_N[plan.inverse_N].tolist() == list(range(len(flat)))
    assert plan.tokens_N.tolist() == [slot // top_k for slot in plan.order_N.tolist()]


def test_flat_ids_are_top_1() -> None:
    flat, column = route_plan(torch.tensor([1, 0, 1]), 2), route_plan(torch.tensor([[1], [0], [1]]), 2)
    assert flat.top_k == column.top_k == 1
    assert all(torch.equal(a, b) for a, b in zip(flat.tensors(), column.tensors(), strict=True))


def test_ids_may_be_a_view() -> None:
    ids = torch.randint(0, 5, (2, 40)).t()
    assert not ids.is_contiguous()
    both = zip(route_plan(ids, 5).tensors(), route_plan(ids.contiguous(), 5).tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


@pytest.mark.parametrize(
    ("ids", "num_experts", "message"),
    [
        (torch.tensor([0.0, 1.0]), 2, "expert_ids has dtype torch.float32"),
        (torch.tensor([True]), 2, "expert_ids has dtype torch.bool"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), 2, "expert_ids has shape"),
        (torch.zeros(2, 0, dtype=torch.int64), 2, "expert_ids has shape"),
        (torch.tensor([0, -1]), 2, "expert_ids holds -1"),
        (torch.tensor([0, 1]), 0, "num_experts is 0"),
    ],
)
def test_wrong_arguments_are_named(ids: torch.Tensor, num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_plan(ids, num_experts)


def test_operator_is_registered_properly() -> None:
    torch.library.opcheck(routing._route_plan, (torch.tensor([1, 0, 3, 2, 1, 1]), 3, 2))
