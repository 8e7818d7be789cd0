"""Checkpoints saved on any number of ranks, under any expert parallelism, load into any other, bitwise."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


def resave(ranks, folder, saved, loaded) -> dict[str, str]:
    folder.mkdir()
    for world, eps in saved.items():
        ranks(world, "program_checkpoint.py", "save", folder, *eps)
    found = {}
    for world, eps in loaded.items():
        found |= ranks(world, "program_checkpoint.py", "load", folder, *eps, timeout=120)
    assert len(found) == sum(map(len, saved.values())) * sum(map(len, loaded.values()))
    return {name: verdict for name, verdict in found.items() if verdict != "equal"}


def test_layouts_load_into_others(ranks, tmp_path):
    assert resave(ranks, tmp_path / "saved", {1: ("r1",), 4: (2,)}, {1: ("r1",), 2: ("r2",), 4: (4,)}) == {}


@pytest.mark.slow
def test_every_layout_loads_into_every_other(ranks, tmp_path):
    every = {1: (1, "r1"), 2: (1, 2, "r1", "r2"), 4: (1, 2, 4)}
    assert resave(ranks, tmp_path / "saved", every, every) == {}
