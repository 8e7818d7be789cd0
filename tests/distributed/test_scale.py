"""The bytes that a step's collectives carry, counted, are those of the closed forms; and the command prints them."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("world", "sharding"), [(4, "fsdp"), (2, "replicate")])
def test_counted_bytes_are_computed_bytes(ranks, world, sharding):
    found = ranks(world, "program_scale.py", sharding)["sizes"]
    assert [one["ep"] for one in found] == [n for n in (1, 2, 4) if n <= world]
    for one in found:
        expected = {"all-gather", "reduce-scatter"} if sharding == "fsdp" else {"all-reduce"}
        assert one["counted"].keys() == expected | ({"all-to-all"} if one["ep"] > 1 else set())
        assert one["counted"] == pytest.approx(one["computed"], rel=1e-9), one["ep"]


@pytest.mark.slow
def test_command(run):
    flags = ["--ranks", 2, "--seq-len", 16, "--sequences", 1, "--steps", 1, "--experts", 2, "--moe-ffn-dim", 32]
    command = [sys.executable, "-m", "openlm_moe.bench", "scale", "--model", "open_lm_test_tiny", *flags]
    found = json.loads(run([*command, "--json"]).stdout)
    assert [one["ep"] for one in found] == [1, 2] and all(one["seconds"] > 0 for one in found)
