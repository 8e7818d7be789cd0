"""`bench tune`: what may win, what is written, who reads it. Kernels run, and are timed, in the interpreter."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from openlm_moe.bench import products, tune
from openlm_moe.bench.__main__ import main
from openlm_moe.bench.shapes import Shape
from openlm_moe_kernels.gpu import tables

PROGRAM = Path(__file__).parent / "program_tune.py"
INTERPRETER = {"TRITON_INTERPRET": "1"}


def keys(table: tables.Table) -> list[tables.Entry]:
    none = tables.Config(32, 32, 32, 4, 1)
    return [replace(entry, config=none) for entry in table.entries]


@pytest.mark.interpreter
def test_a_table_is_measured_written_and_used(tmp_path: Path, run) -> None:
    out = tmp_path / "mine.json"
    command = [sys.executable, "-m", "openlm_moe.bench", "tune", "--layer", "32,48,3,1", "--tokens", "40"]
    flags = ["--dtype", "fp32", "--kernel", "wgrad", "--rounds", "1", "--steps", "1", "--out", out]
    nowhere = run([*command, *flags[:-1], tmp_path / "none" / "mine.json"], env=INTERPRETER)
    assert (nowhere.returncode, nowhere.stdout) == (2, ""), "told before anything is measured"
    assert "there is no folder" in nowhere.stderr
    done = run([*command, *flags], env=INTERPRETER)
    assert done.returncode == 0, done.stderr
    assert f"{tables.OVERRIDE}={out}" in done.stdout
    assert "3 products" in done.stdout

    written, shipped = tables.parse(out.read_text()), tables.load("sm_90")
    assert keys(written) == keys(shipped), "a table's keys are the shipped ones, without numbers of tokens"
    for mine, theirs in zip(written.entries, shipped.entries, strict=True):
        measured = (mine.kernel, mine.bits, mine.aligned) == ("wgrad", 32, True)
        assert measured or mine == theirs

    # Whatever won above, a launch takes its tiles from the file that the environment names.
    entry = next(e for e in written.entries if e.applies("wgrad", 32, "store", 40, 48, True))
    config = replace(entry.config, block_m=32, block_n=16, block_k=16)
    changed = [replace(e, config=config) if e is entry else e for e in written.entries]
    out.write_text(tables.render(replace(written, entries=tuple(changed))))
    done = run([sys.executable, PROGRAM, "use"], env={**INTERPRETER, tables.OVERRIDE: str(out)})
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert used["tiles"] == [[32, 16, 16]]
    assert used["error"] < 1e-6


@pytest.mark.interpreter
def test_a_wrong_choice_never_wins_however_fast(run) -> None:
    done = run([sys.executable, PROGRAM, "wrong"], env=INTERPRETER)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["checked"]["refused"] == [64]
    assert found["checked"]["winner"] != 64
    assert all("rounding" in why for why in found["checked"]["why"])
    assert found["unchecked"] == {"winner": 64, "refused": [], "why": []}, (
        "the wrong choice was meant to be the fastest"
    )


@pytest.mark.interpreter
def test_wrong_kernels_end_the_command(tmp_path: Path, run) -> None:
    """The interpreter's bfloat16 products are off by orders of magnitude, so nothing may be written."""
    out = tmp_path / "mine.json"
    command = [sys.executable, "-m", "openlm_moe.bench", "tune", "--layer", "32,48,3,1", "--tokens", "40"]
    done = run([*command, "--dtype", "bf16", "--kernel", "wgrad", "--steps", "1", "--out", out], env=INTERPRETER)
    assert done.returncode == 2
    assert "--moe-backend torch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune for")
def test_without_a_gpu_one_line_says_so(capsys) -> None:
    assert main(["tune"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("openlm_moe.bench tune: error: no GPU is visible")
    assert "\n" not in said


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--tokens", "0"], ["--steps", "-1"]])
def test_mistakes_are_told_in_a_line(flags: list[str], capsys) -> None:
    assert main(["tune", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "768", "768,3072,8", "768,3072,2,3", "768,3072,8,0", "768,3072,8,2,relu"])
def test_layers_are_read_from_the_command_line(text: str) -> None:
    assert tune.layer("768,3072,8,2") == Shape(768, 3072, 8, 2, "gelu")
    assert tune.layer("768,3072,8,2,swiglu") == Shape(768, 3072, 8, 2, "swiglu")
    with pytest.raises(argparse.ArgumentTypeError, match="is not D,F,E,K"):
        tune.layer(text)


def test_help_says_how_a_table_is_used(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    assert f"{tables.OVERRIDE}=FILE" in capsys.readouterr().out


def test_few_and_many_rows_are_measured() -> None:
    arguments = argparse.Namespace(shape=["830m-e32"], layer=None, tokens=None)
    assert [shape.rows // shape.experts for shape in tune.layers(arguments)] == [256, 32]
    assert [shape.tokens for shape in tune.layers(argparse.Namespace(shape=["830m-e32"], layer=None, tokens=[7]))] == [
        7
    ]


@pytest.mark.parametrize("architecture", tables.shipped())
def test_every_shipped_entry_has_neighbours_that_fit(architecture: str) -> None:
    table = tables.load(architecture)
    for entry in table.entries:
        found = tune.neighbours(table, entry, entry.config)
        assert len(found) >= 4
        assert entry.config not in found
        assert len(set(map(str, found))) == len(set(found)) == len(found)
        assert all(tune.fits(table, entry, config) for config in [entry.config, *found])
        changed = replace(table, entries=tuple(replace(e, config=found[0]) if e is entry else e for e in table.entries))
        assert tables.parse(tables.render(changed)) == changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"sm_90"', '"sm_80"'), "made for sm_80, and this is sm_90"),
        (lambda text: text[:100], "cannot be used"),
        (lambda text: text.replace('"grouped_gemm", "bits": 32', '"grouped_gemm", "bits": 64'), "has no entry for"),
        (lambda text: text.replace('"block_m": 64', '"block_m": 48'), "block_m of a grouped GEMM is 48"),
        (lambda text: text.replace('"block_n"', '"block_o"'), "block_o"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(change, message, tmp_path: Path, monkeypatch) -> None:
    text = tables.render(tables.load("sm_90"))
    path = tmp_path / "table.json"
    path.write_text(text)
    monkeypatch.setenv(tables.OVERRIDE, str(path))
    assert tables.current(torch.device("cpu")) == tables.load("sm_90")
    other = tmp_path / "other.json"
    other.write_text(change(text))
    monkeypatch.setenv(tables.OVERRIDE, str(other))
    with pytest.raises(ValueError, match=message) as error:
        tables.current(torch.device("cpu"))
    assert f"{tables.OVERRIDE}={other}" in str(error.value)


def test_the_error_is_that_of_the_worst_row_and_column() -> None:
    want = torch.randn(2, 30, 20)
    want[1] = 0
    assert products.max_error([want.clone()], [want]) == 0
    for change in (lambda t: t[0, 29].zero_(), lambda t: t[0, :, 19].zero_()):
        got = want.clone()
        change(got)
        assert products.max_error([got], [want]) > 0.5
    got = want.clone()
    got[1, 3, 3] = 1e-30
    assert products.max_error([got], [want]) == float("inf"), "an empty group's gradient is exactly zero"
    got[0, 0, 0] = float("nan")
    assert not products.max_error([got], [want]) <= 1


def test_uneven_groups() -> None:
    offsets = products.uneven_offsets(100, 4)
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    assert sizes[1] == 0
    assert min(sizes) >= 0
    assert sum(sizes) == 95
    assert len(set(sizes)) == 4
    assert products.uneven_offsets(1, 1).tolist() == [1]
