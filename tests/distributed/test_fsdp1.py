"""FSDP1 with our policy trains as one process does: norm, weights after clipped SGD, every expert in the state."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed

DENSE = ["", "blocks.0", "blocks.1.ffn.router", "blocks.1.mixer", "embed", "head", "norm"]


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_fsdp1(ranks, world, ep):
    found = ranks(world, "program_fsdp1.py", ep)
    assert found["units"] == sorted(DENSE + (["blocks.1.ffn.experts"] if ep == 1 else []))
    for micro, differences in found["exact"].items():
        assert max(differences.values()) < 1e-12, (micro, differences)
    assert found["gathered"] == 0.0
    assert found["router"] == ["torch.float32"]
