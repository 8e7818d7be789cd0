"""The benchmarks run, and what they compare is the same computation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from openlm_moe.bench import contenders, kernels, layer
from openlm_moe.bench.__main__ import COMMANDS, main
from openlm_moe.bench.measure import interleaved, summary
from openlm_moe.bench.shapes import SHAPES, Shape

TINY = Shape(dim=16, hidden=24, experts=4, top_k=2, tokens=32)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_contenders_compute_the_same(activation: str) -> None:
    shape = Shape(16, 24, 4, 2, activation, tokens=32)
    x = torch.randn(32, 16)
    weights, ids = contenders.routing(shape, "skewed", "cpu")
    ours, parameters = contenders.ours(shape, torch.float32, "cpu")
    want = ours(x, weights, ids)
    assert want.norm() > 1
    for name, make in contenders.peers().items():
        other, theirs = make(shape, torch.float32, "cpu")
        with torch.no_grad():
            for mine, its in zip(parameters, theirs, strict=True):
                its.copy_(mine if its.shape == mine.shape and "transformers" not in name else mine.mT)
        torch.testing.assert_close(other(x, weights, ids), want, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_routing(kind: str) -> None:
    weights, ids = contenders.routing(Shape(8, 8, 8, 2, tokens=4000), kind, "cpu")
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert weights.shape == ids.shape == (4000, 2)
    assert (ids[:, 0] != ids[:, 1]).all()
    if kind == "balanced":
        assert counts.tolist() == [1000] * 8
    else:
        assert counts[0] > 1.5 * counts[3] > 1.5 * counts[7] > 0


def test_saved_bytes_are_counted() -> None:
    """x, the pre-activation, the weights and the plan; for the dense layer x, the pre-activation and the activation."""
    x = torch.randn(32, 16, requires_grad=True)
    weights, ids = contenders.routing(TINY, "balanced", "cpu")
    dense, parameters = contenders.dense(TINY, torch.float32, "cpu")
    assert layer.saved_bytes(dense, parameters, x, weights, ids) == 4 * (32 * 16 + 2 * 32 * 48)
    ours, parameters = contenders.ours(TINY, torch.float32, "cpu")
    rows, plan = 64, 3 * 8 * 64 + 2 * 4 * 4
    assert layer.saved_bytes(ours, parameters, x, weights, ids) == 4 * (32 * 16 + rows * 24 + rows) + plan


def test_ratios_are_taken_within_rounds() -> None:
    found = summary({"floor": [1.0, 2.0, 4.0], "other": [2.0, 3.0, 20.0]}, "floor")
    assert found["other"] == {"ms": 3000.0, "ratio": 2.0}
    calls: list[str] = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, "cpu")
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]


@pytest.mark.parametrize("module", [layer, kernels])
def test_measure(module) -> None:
    found = module.measure(vars(TINY), "bf16", "balanced", "cpu", rounds=1, backend="torch")
    text = module.table(
        {
            "name": "tiny",
            "shape": vars(TINY),
            "dtype": "bf16",
            "routing": "balanced",
            "device": "cpu",
            "malloc": "tuned",
            **found,
        }
    )
    assert "openlm_moe" in text
    assert "tiny: d 16, hidden 24, E 4, top-2, T 32, bf16" in text


def test_layer_command_in_a_process_of_its_own(tmp_path: Path, run) -> None:
    record = tmp_path / "layer.json"
    flags = ["--shape", "41m-e8", "--tokens", "64", "--rounds", "1", "--dtype", "fp32", "--json", record]
    done = run([sys.executable, "-m", "openlm_moe.bench", "layer", *flags])
    assert done.returncode == 0, done.stderr
    tuned, untuned = json.loads(record.read_text())
    assert (tuned["malloc"], untuned["malloc"]) == ("tuned", "untuned")
    assert tuned["results"]["dense"]["ratio"] == 1
    assert {"openlm_moe", "F.grouped_mm", "loop"} <= set(tuned["results"])
    assert "malloc untuned" in done.stdout


@pytest.mark.parametrize("how", [[], ["--pure"], ["--no-optimizer"]])
def test_model_command(run, how: list[str]) -> None:
    flags = [*how, "--model", "open_lm_11m", "--seq-len", "16", "--sequences", "1", "--rounds", "1", "--experts", "4"]
    done = run([sys.executable, "-m", "openlm_moe.bench", "model", *flags])
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["dense", "moe"]


def test_mistakes_are_told_in_a_line(capsys) -> None:
    assert main(["layer", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
    assert {"layer", "kernels", "model"} <= set(COMMANDS)
    assert SHAPES["mixtral-8x7b"].width == 2 * 14336
