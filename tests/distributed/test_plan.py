"""check_plan accepts the plan that apply_fsdp makes and refuses others; collectives come in the wanted order."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def words_of():
    return {
        "block_as_unit": "an all-to-all runs in forward while the sharded unit of blocks.1 is open",
        "root_with_parameters": "an all-to-all runs in forward while the sharded unit of the root is open",
        "list_spans": "an all-to-all runs in forward while the sharded unit of embed + head is open",
        "plain_shards": "blocks.1.ffn.experts.w1 stands for 2 of 4 experts",
        "replicated_experts": "blocks.1.ffn.experts.w1 is not split over the ranks [0, 1]",
        "unwrapped_head": "parameter head.weight is in no sharded unit",
        "two_units": "a parameter is in two units",
        "post norm, grouped": "in forward while the sharded unit of 1.norm1 + 1.norm2 is open",
        "low_router": "blocks.1.ffn.router computes in bfloat16",
    }


def test_plans(ranks, words_of):
    found = ranks(2, "program_plan.py")
    for plan in ("right", "apply_fsdp", "amp", "tied", "post norm"):
        assert found.pop(plan) == "accepted", plan
    assert found.pop("trace") == {"no gradient": True, "random state": True, "mode": True}
    assert found.keys() == words_of.keys()
    for plan, words in words_of.items():
        assert words in found[plan]


def experts_come_first(words: list[str]) -> bool:
    """Whether in each block the experts' all-gather is issued before the first exchange."""
    gathered = False
    for word in words:
        if word.startswith("gather experts"):
            gathered = True
        if word.startswith("exchange") and not gathered:
            return False
        if word.startswith("gather") and not word.startswith("gather experts") and "backward" not in word:
            gathered = False  # the next block begins
    return True


def test_experts_are_gathered_before_rows_travel(ranks):
    """4 ranks, expert parallel 2, two MoE layers between dense blocks."""
    found = ranks(4, "program_plan.py", "order")
    assert found["same"], "ranks issue their collectives in different orders"
    last = found["words"].pop("last")
    assert experts_come_first([word for word in last if "backward" not in word]), last
    assert last.index("gather experts (backward)") < last.index("exchange (backward)"), last
    for kind, words in found["words"].items():
        forward = [word for word in words if "backward" not in word]
        backward = [word.removesuffix(" (backward)") for word in words if "backward" in word]
        assert experts_come_first(forward), (kind, forward)
        exchanges = [i for i, word in enumerate(backward) if word.startswith("exchange")]
        gathers = [i for i, word in enumerate(backward) if word == "gather experts"]
        assert len(gathers) == 2, kind
        half = exchanges[len(exchanges) // 2]
        assert gathers[0] < exchanges[0], (kind, backward)
        assert exchanges[len(exchanges) // 2 - 1] < gathers[1] < half, (kind, backward)
    off = [word for word in found["words"]["off"] if word.startswith("exchange")]
    assert off == ["exchange counts", *["exchange"] * 3] * 2 + ["exchange (backward)"] * 6
