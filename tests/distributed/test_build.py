"""A rank builds its own share and nothing else, with the values of a one-process build."""

from __future__ import annotations

import sys

import pytest

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for a process's peak memory"),
]

SLACK_MB = 12  # allocator and interpreter; a build that held a second expert stack would need 16 or more


def test_two_ranks(ranks):
    found = ranks(2, "program_build.py")
    assert set(found["bitwise"].values()) == {True}, found["bitwise"]
    assert found["tied"] is True
    for layout, peak in found["peak"].items():
        assert peak["share"] < 0.6 * peak["whole"], layout
        assert peak["most"] < peak["share"] + peak["expert matrix"] + SLACK_MB, (layout, peak)
