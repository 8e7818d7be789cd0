"""Launch parameters: one JSON table per architecture beside this file, chosen by what a model fixes, not by its batch.

An entry applies to a product if all its keys do: `kernel`, `bits` of the dtype, `variants`, and, where it has them,
`max_rows` (mean rows per group) and `max_columns` (N). Entries are for operands that vector loads can read
(`is_aligned`) unless they say `"aligned": false`. The first entry that applies is taken. Token counts enter through
`max_rows` alone, so a model compiles one or two variants of a kernel, whatever its batches. `bench tune` writes such
files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
OVERRIDE = "OPENLM_MOE_KERNEL_TABLE"  # environment variable: the path of a table to use instead of the shipped one
ROW_BLOCKS = (32, 64, 128)  # every block_m of a grouped GEMM; the tile map has a section for each

# The activation in the epilogue; whether a gradient is stored or added to a given one.
VARIANTS = {"grouped_gemm": ("none", "gelu", "swiglu"), "wgrad": ("store", "add")}


@dataclass(frozen=True)
class Config:
    """Tile sizes and compiler options of one launch.

    `block_m` counts rows, `block_k` and `block_n` the product's K and N. `group` tiles share a band of the other
    operand. `tma`: operands that are not gathered come through tensor descriptors. `programs_per_sm` 0 launches one
    program a tile, another number that many persistent programs per multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    tma: bool = False
    programs_per_sm: int = 0
    extra: dict[str, int] = field(default_factory=dict, hash=False)  # compiler options that one vendor has

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, **self.extra}

    def __str__(self) -> str:
        words = [f"{self.block_m}x{self.block_n}x{self.block_k} {self.warps}w {self.stages}s"]
        words += [f"group {self.group}"] if self.group != 8 else []
        words += ["tma"] if self.tma else []
        words += [f"persistent {self.programs_per_sm}"] if self.programs_per_sm else []
        return " ".join(words + [f"{key} {value}" for key, value in self.extra.items()])


@dataclass(frozen=True)
class Entry:
    """A configuration and the products that it is for."""

    kernel: str  # "grouped_gemm" | "wgrad"
    bits: int  # 16 | 32
    variants: tuple[str, ...]  # some of VARIANTS[kernel]
    config: Config
    max_rows: int | None = None
    max_columns: int | None = None
    aligned: bool = True

    def applies(self, kernel: str, bits: int, variant: str, rows: int, columns: int, aligned: bool) -> bool:
        return (
            (self.kernel, self.bits) == (kernel, bits)
            and variant in self.variants
            and (aligned or not self.aligned)
            and (self.max_rows is None or rows <= self.max_rows)
            and (self.max_columns is None or columns <= self.max_columns)
        )


@dataclass(frozen=True)
class Table:
    """The entries of one architecture, and its shared memory in bytes per block."""

    architecture: str
    shared_memory: int
    entries: tuple[Entry, ...]

    def select(self, kernel: str, dtype: torch.dtype, variant: str, rows: int, columns: int, aligned: bool) -> Config:
        """The configuration of the entry that serves a product; see `entry`."""
        return self.entry(kernel, 8 * dtype.itemsize, variant, rows, columns, aligned).config

    def entry(self, kernel: str, bits: int, variant: str, rows: int, columns: int, aligned: bool) -> Entry:
        """The first entry that applies; LookupError if none does. A table that was parsed serves every product."""
        key = (kernel, bits, variant, rows, columns, aligned)
        for entry in self.entries:
            if entry.applies(*key):
                return entry
        raise LookupError(f"the kernel table of {self.architecture} has no entry for {key}")


def parse(text: str) -> Table:
    """A table from its JSON text; ValueError or LookupError names what is wrong with it."""
    try:
        data = json.loads(text)
        entries = tuple(_entry(item) for item in data["entries"])
        table = Table(str(data["architecture"]), int(data["shared_memory"]), entries)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a kernel table: {error!r}") from error
    for kernel, variants in VARIANTS.items():
        for variant in variants:
            for bits in (16, 32):
                table.entry(kernel, bits, variant, sys.maxsize, sys.maxsize, False)  # the hardest to serve
    return table


def _entry(item: dict[str, Any]) -> Entry:
    config = Config(**item["config"])
    if item["kernel"] == "grouped_gemm" and config.block_m not in ROW_BLOCKS:
        raise ValueError(f"block_m of a grouped GEMM is {config.block_m}; it must be one of {ROW_BLOCKS}")
    keys = {key: value for key, value in item.items() if key != "config"}
    return Entry(**{**keys, "variants": tuple(item["variants"]), "config": config})


def render(table: Table) -> str:
    """The JSON text of a table, one entry a line; `parse` reads it back."""
    default = Config(0, 0, 0, 0, 0)
    lines = []
    for entry in table.entries:
        item = {key: value for key, value in asdict(entry).items() if value is not None}
        if entry.aligned:
            del item["aligned"]
        config = item.pop("config")
        item["config"] = {k: v for k, v in config.items() if v != getattr(default, k) or k.startswith("block")}
        lines.append("    " + json.dumps(item))
    head = f'{{\n  "architecture": "{table.architecture}",\n  "shared_memory": {table.shared_memory},\n  "entries": [\n'
    return head + ",\n".join(lines) + "\n  ]\n}\n"


def shipped() -> list[str]:
    """Names of the architectures with a table of their own."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def family(architecture: str) -> str:
    """The shipped table that serves an architecture: its own, or that of a relative with no more memory."""
    if architecture.startswith("gfx"):
        return "gfx942"
    capability = int(architecture.removeprefix("sm_"))
    if capability in (80, 87):
        return "sm_80"
    if 90 <= capability < 100:
        return "sm_90"
    if 100 <= capability < 110:
        return "sm_100"
    # 8.6, 8.9 and 12.x have 99 KiB of shared memory; for 12.x the compiler needs smaller tiles.
    return "sm_120" if capability >= 120 else "sm_89"


def is_aligned(*matrices: Tensor) -> bool:
    """Whether every row (or every column) of these stacked matrices starts at a multiple of 16 elements and 16 bytes.

    16 elements, because that is what triton's compiler learns about sizes and strides.
    """
    return all(
        t.data_ptr() % 16 == 0
        and 1 in t.stride()[-2:]
        and all(s % 16 == 0 for s in t.stride() if s != 1)
        and all(n % 16 == 0 for n in t.shape[-1:])
        for t in matrices
    )


@cache
def architecture_of(device: torch.device) -> str:
    """`sm_90`, `gfx942`, ...; for the interpreter on a CPU, and for meta tensors, the one with every feature."""
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def load(architecture: str) -> Table:
    """The table shipped for `architecture` or its family."""
    return parse((FOLDER / f"{family(architecture)}.json").read_text())


@cache
def _load_override(path: str, architecture: str) -> Table:
    try:
        table = parse(Path(path).read_text())
        if family(table.architecture) != family(architecture):
            raise ValueError(f"it was made for {table.architecture}, and this is {architecture}")
        return table
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{OVERRIDE}={path} cannot be used: {error}") from error


_forced: Table | None = None


@contextmanager
def use(table: Table) -> Iterator[None]:
    """Inside, `table` serves every device: to measure, test or compile an entry."""
    global _forced
    previous, _forced = _forced, table
    try:
        yield
    finally:
        _forced = previous


def current(device: torch.device) -> Table:
    """The table for `device`: one in `use`, the file named by OPENLM_MOE_KERNEL_TABLE, or the shipped one."""
    if _forced is not None:
        return _forced
    if path := os.environ.get(OVERRIDE):
        return _load_override(path, architecture_of(device))
    return load(architecture_of(device))


def only(table: Table, entry: Entry) -> Table:
    """`table` in which `entry`'s configuration serves every product of its kernel, to exercise it alone."""
    always = Entry(entry.kernel, entry.bits, VARIANTS[entry.kernel], entry.config, aligned=False)
    return Table(table.architecture, table.shared_memory, (always, *table.entries))
