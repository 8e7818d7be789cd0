"""Converters hold the output and little more: at most one layer's experts beyond it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from openlm_moe.parallel import Checkpointer

LAYERS, EXPERTS = 6, (8, 256, 1024)
MB = 2**20
MATRIX = 8 * 256 * 1024 * 4 / MB

MEASURE = """
import sys
from pathlib import Path
from openlm_moe.convert import dcp_to_pt, pt_to_dcp
from openlm_moe.convert.__main__ import main

def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

main(sys.argv[1:4])  # what is imported at first use does not count
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
assert main(sys.argv[4:]) == 0
print("PEAK", memory("VmHWM") - before)
"""


class Weights(nn.Module):
    def __init__(self, layers: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        for i in range(layers):
            for name in ("w1", "w2"):
                self.register_parameter(f"{name}_{i}", nn.Parameter(torch.ones(shape)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for a process's peak memory")
def test_peak(run, tmp_path):
    for name, size in (("small", (1, (2, 2, 2))), ("large", (LAYERS, EXPERTS))):
        keeper = Checkpointer(tmp_path / name, asynchronous=False)
        keeper.save(1, Weights(*size), None, {"step": 1, "epoch": 1})
        keeper.close()

    def peak(command: str, first: list, then: list) -> float:
        done = run([sys.executable, "-c", MEASURE, command, *first, command, *then])
        assert done.returncode == 0, done.stderr
        return float(done.stdout.split("PEAK")[1])

    output, slack = 2 * LAYERS * MATRIX, 16
    step = "step_0000001"
    found = peak(
        "dcp-to-pt",
        [tmp_path / "small" / step, tmp_path / "s"],
        [tmp_path / "large" / step, tmp_path / "l"],
    )
    assert output < found < output + 2 * MATRIX + slack
    found = peak(
        "pt-to-dcp",
        [tmp_path / "s" / "epoch_1.pt", tmp_path / "small-back"],
        [tmp_path / "l" / "epoch_1.pt", tmp_path / "large-back"],
    )
    assert found < output + 2 * MATRIX + slack
