"""The example file runs as printed, and its model learns."""

from __future__ import annotations

import math

from openlm_moe.example_training_loop import text, train


def test_example_learns_with_balanced_experts(capsys) -> None:
    losses = train(60)
    uniform = math.log(len(set(text())))
    assert abs(losses[0] - uniform) < 0.5  # nothing is known at the start
    assert sum(losses[-5:]) / 5 < 0.65 * uniform
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # steps 0, 20, 40 and the last
    last = [int(number) for number in lines[-1].split("[")[1].rstrip("]").split(",")]
    assert sum(last) == 2 * 8 * 64  # top-2 of 8 sequences of 64
    assert min(last) > 0
