"""Several ranks equal one process on the joined batch: loss, gradients, inputs' gradients, norm, weights."""

from __future__ import annotations

import pytest

LAYOUTS = [(2, 1, "fsdp"), (2, 2, "fsdp"), (4, 2, "fsdp"), (4, 4, "fsdp"), (2, 2, "replicate"), (4, 2, "hybrid")]
MORE = [(2, "off", "replicate"), (4, 1, "hybrid"), (4, 4, "replicate"), (4, "auto", "fsdp")]

pytestmark = pytest.mark.distributed


def judge(found: dict, ep: int) -> None:
    assert found.pop("ep") == ep
    single = found.pop("fp32")
    assert single["weights"] < 1e-6 and single["loss"] < 1e-6 and single["norm"] < 1e-6
    assert single["grad"] < 1e-5 and single["input"] < 1e-5
    for case, differences in found.items():
        assert max(differences.values()) < 1e-12, (case, differences)


@pytest.mark.parametrize(("world", "ep", "sharding"), LAYOUTS)
def test_equals_one_process(ranks, world, ep, sharding):
    judge(ranks(world, "program_exact.py", ep, sharding, "quick"), ep)


@pytest.mark.slow
def test_replicas_of_shards_of_experts(ranks):
    """Eight ranks: two replicas, each of two shards of two expert-parallel ranks."""
    judge(ranks(8, "program_exact.py", 2, "hybrid", "quick", timeout=200), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "sharding"), LAYOUTS + MORE)
def test_equals_one_process_in_every_mode(ranks, world, ep, sharding):
    wanted = {"off": 1, "auto": 4}.get(ep, ep)
    judge(ranks(world, "program_exact.py", ep, sharding, "all", timeout=280), wanted)
