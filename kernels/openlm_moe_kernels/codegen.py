"""`python -m openlm_moe_kernels.codegen`: compiles every kernel in every shipped configuration, without a GPU.

The backend's own functions run on meta tensors while a stub driver names the target, so what is compiled is what a
launch would compile, with the same specialisation. Prints a table and exits with code 1 where the bar is missed:

- no register spilled
- shared memory within what the architecture's table says a block has
- 16-bit products: wgmma (sm_90), HMMA (sm_8x, sm_120), tcgen05 (sm_100), MFMA (gfx); on NVIDIA cp.async or TMA loads
  (but where rows start anywhere: neither can load those)
- float32 products: no TF32
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from openlm_moe_kernels.codegen_calls import Call, calls
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.launch import Launcher, interpreted, launcher

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TENSOR_CORE = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx90a": "v_mfma", "gfx942": "v_mfma"}  # HMMA elsewhere
_ASYNC_COPY = ("LDGSTS", "UTMALDG")  # cp.async, TMA


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel in one configuration."""

    target: str
    kernel: str
    case: str
    dtype: str
    config: str
    registers: int
    spill_loads: int
    spill_stores: int
    shared_memory: int
    tensor_core: str  # instruction and how many, "" without
    async_copies: str
    tf32: bool
    product: bool  # a GEMM, whose main loop must use tensor cores
    aligned: bool  # sizes that asynchronous copies need

    @property
    def label(self) -> str:
        return f"{self.target} {self.kernel} {self.case} {self.dtype} {self.config}"

    def misses(self) -> list[str]:
        """The parts of the bar that this kernel misses."""
        found = []
        limit = tables.load(self.target).shared_memory
        if self.spill_loads or self.spill_stores:
            found.append(f"{self.spill_loads} spill loads, {self.spill_stores} spill stores")
        if self.shared_memory > limit:
            found.append(f"{self.shared_memory} bytes of shared memory, of {limit}")
        if self.product and self.dtype != "fp32":
            if not self.tensor_core:
                found.append("no tensor-core instruction")
            if self.aligned and not self.async_copies and self.target.startswith("sm_"):
                found.append("no asynchronous copy")
        if self.tf32:
            found.append("TF32 in a float32 kernel")
        return found


class _OfflineDriver:
    """What triton's JIT asks a driver before it compiles, answered for a GPU that is not there."""

    def __init__(self, target: str) -> None:
        self.name = target
        is_amd = target.startswith("gfx")
        self.target = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target[3:]), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.name  # the key of the JIT's cache of compiled kernels

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compile_only(target: str) -> Iterator[list[Any]]:
    """Inside, launches compile for `target` and do not run; yields the list that compiled kernels are added to."""
    compiled: list[Any] = []

    def wrap(_: Launcher) -> Launcher:
        def compile_launch(kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]) -> None:
            compiled.append(kernel.warmup(grid=grid, **arguments))

        return compile_launch

    triton.runtime.driver.set_active(_OfflineDriver(target))
    try:
        with launcher(wrap):
            yield compiled
    finally:
        triton.runtime.driver.set_active(None)  # the next to ask finds the machine's own


def compile_case(target: str, call: Call, dtype: str) -> Report:
    """Compiles one call for `target` and measures the kernel it launches last (its own; a tile map may come before)."""
    with compile_only(target) as compiled, tables.use(call.table):
        call.run(DTYPES[dtype])
    return measure(target, compiled[-1], call, dtype)


def measure(target: str, kernel: Any, call: Call, dtype: str) -> Report:
    """Registers, spills and instructions of a compiled kernel."""
    common = {
        "target": target,
        "kernel": call.kernel,
        "case": call.case,
        "dtype": dtype,
        "config": call.config,
        "shared_memory": kernel.metadata.shared,
        "product": call.product,
        "aligned": call.aligned,
    }
    core = _TENSOR_CORE.get(target, "HMMA")
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        number = {
            key: int(re.search(rf"\.{key}:\s*(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        spills = number["vgpr_spill_count"] + number["sgpr_spill_count"]
        measured = {"registers": number["vgpr_count"], "spill_loads": spills, "spill_stores": spills}
        tf32, copies = "_xf32" in text, ()
    else:
        usage, text = _disassemble(kernel.asm["cubin"])
        measured = {
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),
            "spill_loads": _count("LDL", text),
            "spill_stores": _count("STL", text),
        }
        tf32 = "tf32" in kernel.asm["ptx"]
        copies = _ASYNC_COPY
    return Report(
        **common,
        **measured,
        tensor_core=_describe([core], text),
        async_copies=_describe(copies, text),
        tf32=tf32,
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, by the cuobjdump that comes in triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, code


def _count(instruction: str, text: str) -> int:
    return len(re.findall(rf"(?<![A-Z]){instruction}(?![A-Z])", text))


def _describe(instructions: Any, text: str) -> str:
    counts = {name: _count(name, text) for name in instructions}
    return " ".join(f"{name} {count}" for name, count in counts.items() if count)


def planned(table: tables.Table) -> list[tuple[Call, str]]:
    """What is compiled of a table: each call in each of its dtypes."""
    return [(call, dtype) for call in calls(table) for dtype in call.dtypes]


def label(target: str, call: Call, dtype: str) -> str:
    """The name of a row, as `Report.label`."""
    return f"{target} {call.kernel} {call.case} {dtype} {call.config}"


def compile_target(target: str, table: tables.Table, only: str) -> list[Report]:
    """Reports of every call of one target whose label contains `only`."""
    return [compile_case(target, call, dtype) for call, dtype in planned(table) if only in label(target, call, dtype)]


COLUMNS: dict[str, Callable[[Report], Any]] = {
    "target": lambda r: r.target,
    "kernel": lambda r: r.kernel,
    "case": lambda r: r.case,
    "dtype": lambda r: r.dtype,
    "configuration": lambda r: r.config,
    "registers": lambda r: r.registers,
    "spill loads": lambda r: r.spill_loads,
    "spill stores": lambda r: r.spill_stores,
    "shared memory": lambda r: r.shared_memory,
    "tensor cores": lambda r: r.tensor_core or "-",
    "async copies": lambda r: r.async_copies or "-",
}


def markdown(reports: list[Report]) -> str:
    """The table, one row a compiled kernel."""
    rows = [list(COLUMNS), *[[str(column(report)) for column in COLUMNS.values()] for report in reports]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(folder: Path, reports: list[Report], title: str, table: str) -> None:
    """The record: codegen.md to read, and codegen.json with one kernel a line."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("  " + json.dumps(asdict(report)) for report in reports)
    (folder / "codegen.json").write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n{rows}\n]}}\n')
    made = "Made by `python -m openlm_moe_kernels.codegen --out results/kernels`, on a machine without a GPU."
    (folder / "codegen.md").write_text(f"# Compiled kernels\n\n{title}. {made}\n\n{table}\n")


def read(folder: Path) -> tuple[str, list[Report]]:
    """The version of triton and the reports that `write` left in a folder."""
    record = json.loads((folder / "codegen.json").read_text())
    return record["triton"], [Report(**row) for row in record["kernels"]]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m openlm_moe_kernels.codegen", description=__doc__.split("\n\n")[0])
    p.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="architectures (default: all)")
    p.add_argument("--table", type=Path, help="a kernel table to compile for its architecture, not the shipped ones")
    p.add_argument("--only", default="", help="compile the rows whose name contains this, as the messages give it")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, each compiling for one architecture")
    p.add_argument("--out", type=Path, help="folder to write codegen.json and codegen.md to")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if interpreted():
        print("TRITON_INTERPRET is set, and an interpreter compiles nothing: unset it", file=sys.stderr)
        return 2
    chosen = {target: tables.load(target) for target in args.target}
    if args.table:
        try:
            table = tables.parse(args.table.read_text())
        except (OSError, ValueError, LookupError) as error:
            print(f"--table {args.table} cannot be used: {error}", file=sys.stderr)
            return 2
        chosen = {table.architecture: table}
    work = [(target, table, args.only) for target, table in chosen.items()]
    if args.jobs > 1 and len(work) > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            reports = [report for part in pool.map(compile_target, *zip(*work, strict=True)) for report in part]
    else:
        reports = [report for item in work for report in compile_target(*item)]
    title = f"triton {triton.__version__}: {len(reports)} kernels compiled for {', '.join(chosen)}"
    table = markdown(reports)
    print(table)
    misses = [f"{report.label}: {miss}" for report in reports for miss in report.misses()]
    print(f"\n{title}; {len(misses)} missed the bar" + "".join(f"\n  {miss}" for miss in misses))
    if args.out:
        write(args.out, reports, title, table)
    return 1 if misses or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
