"""Skew, delays, poisoned buffers, odd expert counts, one rank's NaN: nothing hangs, leaks or differs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


def test_two_ranks(ranks):
    found = ranks(2, "program_robust.py", "all")
    assert found["skewed"]["worst"] < 1e-12
    assert found["skewed"]["empty experts"] == 0.0 and found["skewed"]["missing"] == 0
    assert found["one holds all"]["worst"] < 1e-12
    assert found["padding"] < 1e-12 and found["capacity"] < 1e-12
    assert found["poisoned"] == {"poison works": True, "losses": True, "gradients": True}
    assert found["nan"] == {"none steps": True, "unscaled": True}
    assert found["clipping"] < 1e-12
    for experts in ("3", "1"):
        assert found["odd"][experts]["worst"] < 1e-12
        assert found["odd"][experts]["dim"] == 1 and found["odd"][experts]["held"] == 0.5
    assert found["wrong factor"] > 0.1, "a wrong factor on expert gradients would go unnoticed"
    fp32 = found["trains"]["fp32"]["loss"]
    for mode, trained in found["trains"].items():
        assert trained["still"] == [] and trained["groups"] and trained["fp32"] and trained["steps"], mode
        assert trained["combine weights"], mode
        assert trained["loss"] == pytest.approx(fp32, rel=1e-6 if "bf16" not in mode and mode != "amp" else 1e-2), mode
    assert found["router"] > 1e-3
    assert found["global"] < 1e-12
    assert found["evaluation"]["evaluation"] < 1e-12 and found["evaluation"]["after"] < 1e-12
    assert found["frozen"] is True


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_routing_with_late_ranks_does_not_hang(ranks, world):
    assert ranks(world, "program_robust.py", "random", 2, 50, timeout=120) == {"came to its end": True}
