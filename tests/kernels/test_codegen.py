"""What the compiler makes of the kernels for GPUs that are not here: instructions, registers, memory, and the record.

Interpreted kernels cannot be compiled, so this needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton

from openlm_moe_kernels import codegen
from openlm_moe_kernels.gpu import grouped_gemm, tables

RECORD = Path(__file__).resolve().parents[2] / "results" / "kernels"
RENEW = "renew it: python -m openlm_moe_kernels.codegen --out results/kernels"
OTHER_TRITONS = ("3.6.0", "3.9.0")


def representatives() -> list[tuple[str, str]]:
    """(target, label) of each kernel's first configuration on sm_90, and of one product in each width elsewhere."""
    chosen = []
    for target in codegen.TARGETS:
        seen = set()
        for call, dtype in codegen.planned(tables.load(target)):
            key = (call.kernel, call.aligned) if target == "sm_90" else (call.kernel.split()[0], dtype)
            wanted = dtype == "bf16" if target == "sm_90" else call.product and call.aligned and dtype != "fp16"
            if wanted and key not in seen:
                seen.add(key)
                chosen.append((target, codegen.label(target, call, dtype)))
    return chosen


@pytest.fixture(scope="module")
def record() -> tuple[str, dict[str, codegen.Report]]:
    version, reports = codegen.read(RECORD)
    return version, {report.label: report for report in reports}


@pytest.mark.parametrize(("target", "label"), representatives(), ids=lambda value: value.replace(" ", "-"))
def test_compiles_to_what_the_record_says(target, label, record) -> None:
    call, dtype = next(item for item in codegen.planned(tables.load(target)) if codegen.label(target, *item) == label)
    report = codegen.compile_case(target, call, dtype)
    assert report.misses() == []
    assert report.registers > 0
    version, recorded = record
    if version == triton.__version__:
        assert report == recorded[label], RENEW


def test_the_record_is_of_todays_configurations_and_meets_the_bar(record) -> None:
    _, recorded = record
    today = [
        codegen.label(target, *item) for target in codegen.TARGETS for item in codegen.planned(tables.load(target))
    ]
    assert len(today) == len(set(today)), "two rows of the table cannot be told apart"
    assert set(recorded) == set(today), RENEW
    assert [(label, report.misses()) for label, report in recorded.items() if report.misses()] == []
    text = (RECORD / "codegen.md").read_text()
    assert codegen.markdown(list(recorded.values())) in text, RENEW


def test_every_shipped_table_is_compiled() -> None:
    assert {tables.family(target) for target in codegen.TARGETS} == set(tables.shipped())


def test_the_main_loops_of_hopper_use_wgmma_and_asynchronous_copies(record) -> None:
    """Said again without `misses`, which could forget it: a record of every 16-bit product whose rows are aligned."""
    _, recorded = record
    products = [r for r in recorded.values() if r.product and r.dtype != "fp32"]
    cores = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
    assert {r.target for r in products} >= set(cores)
    for report in products:
        assert report.tensor_core.startswith(cores.get(report.target, report.tensor_core)), report.label
        assert report.tensor_core
        if report.aligned and report.target == "sm_90":
            assert "UTMALDG" in report.async_copies or "LDGSTS" in report.async_copies, report.label
        if report.aligned and report.target == "sm_80":
            assert "LDGSTS" in report.async_copies, report.label
    assert any("UTMALDG" in r.async_copies for r in products if r.target == "sm_90")
    assert not any(r.tensor_core for r in recorded.values() if r.dtype == "fp32" and r.target.startswith("sm_"))


def test_a_kernel_with_tf32_is_reported() -> None:
    def run(dtype: torch.dtype) -> None:
        x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((256, 64), (2, 64, 64)))
        offsets = torch.empty(2, dtype=torch.int32, device="meta")
        grouped_gemm.grouped_gemm(x, w, offsets, allow_tf32=True)

    call = next(c for c, dtype in codegen.planned(tables.load("sm_90")) if c.case == "plain" and dtype == "fp32")
    report = codegen.compile_case("sm_90", replace(call, run=run), "fp32")
    assert report.misses() == ["TF32 in a float32 kernel"]


def test_spills_are_reported_with_the_rows_name_and_exit_code(tmp_path: Path, capsys) -> None:
    table = tables.load("sm_80")
    entry = next(e for e in table.entries if e.kernel == "grouped_gemm" and e.bits == 16 and not e.max_rows)
    config = tables.Config(block_m=128, block_n=128, block_k=32, warps=2, stages=3)
    path = tmp_path / "spilling.json"
    path.write_text(tables.render(replace(table, entries=(replace(entry, config=config), *table.entries))))
    only = f"grouped_gemm plain bf16 {config}"
    assert codegen.main(["--table", str(path), "--only", only, "--out", str(tmp_path / "record")]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"  sm_80 {only}: ")
    assert "spill loads" in said
    (report,) = codegen.read(tmp_path / "record")[1]
    assert report.spill_loads > 0
    assert report.misses() == [said.partition(f"{only}: ")[2]]


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({"shared_memory": 232449}, "232449 bytes of shared memory, of 232448"),
        ({"tensor_core": ""}, "no tensor-core instruction"),
        ({"async_copies": ""}, "no asynchronous copy"),
        ({"spill_loads": 1}, "1 spill loads, 0 spill stores"),
    ],
)
def test_each_part_of_the_bar(change, miss, record) -> None:
    good = next(r for r in record[1].values() if r.target == "sm_90" and r.product and r.aligned and r.dtype == "bf16")
    assert good.misses() == []
    assert replace(good, **change).misses() == [miss]


def test_a_bad_table_is_told_in_a_line(tmp_path: Path, capsys) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"architecture": "sm_90", "shared_memory": 1, "entries": []}')
    assert codegen.main(["--table", str(path)]) == 2
    assert "has no entry for" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_record_is_what_the_compiler_makes_today(tmp_path: Path, record, run) -> None:
    version, recorded = record
    if version != triton.__version__:
        pytest.skip(f"the record is triton {version}'s, and this is {triton.__version__}")
    done = run([sys.executable, "-m", "openlm_moe_kernels.codegen", "--out", tmp_path], timeout=3500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert {report.label: report for report in codegen.read(tmp_path)[1]} == recorded, RENEW


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHER_TRITONS)
def test_other_tritons_compile_everything(version: str, tmp_path: Path, run) -> None:
    """The wheel is unpacked beside the environment's own, and comes first on the path of a new process."""
    targets = ["sm_80", "sm_90", "sm_100", "gfx942"]
    with tempfile.TemporaryDirectory() as wheel:  # up to 1 GB, which tmp_path would keep
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", wheel]
        installed = run([*install, f"triton=={version}"], timeout=900)
        if installed.returncode:
            pytest.skip(f"pip cannot install triton {version}: {installed.stderr.strip().splitlines()[-1]}")
        command = [sys.executable, "-m", "openlm_moe_kernels.codegen", "--target", *targets]
        done = run(
            [*command, "--out", tmp_path / "record"],
            timeout=2600,
            env={"PYTHONPATH": os.pathsep.join([wheel, os.environ.get("PYTHONPATH", "")])},
        )
    assert (tmp_path / "record" / "codegen.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "record" / "codegen.json").read_text())["triton"] == version
    reports = codegen.read(tmp_path / "record")[1]
    assert len(reports) == sum(len(codegen.planned(tables.load(target))) for target in targets)
    # How many registers a kernel gets is each version's own affair; instructions and arithmetic are not.
    assert [r.label for r in reports for miss in r.misses() if "spill" not in miss] == []
