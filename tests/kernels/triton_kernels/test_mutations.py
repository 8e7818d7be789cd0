"""The checks of this folder catch the mistakes they are there for: each one, made in a copy of a kernel, fails one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from row_cases import ActBackward, Rows, check_act_backward, check_long_sums, check_rows
from triton_cases import SMALL, Product, check_product, check_tile_map, check_wgrad, forced

from openlm_moe_kernels.gpu import activation, grouped_gemm, rows, tiles, wgrad


def products(module: ModuleType) -> None:
    """Several tiles of every dimension, none of them full; then longer sums in bfloat16."""
    with forced(SMALL):
        for activation_name in (None, "gelu", "swiglu"):
            case = Product((33, 0, 5), 7, 40, 72, gathered=True, activation=activation_name, scaled=True)
            check_product(case, module.grouped_gemm)
        check_product(Product((9,), 0, 520, 40, torch.bfloat16), module.grouped_gemm)


def gradients(module: ModuleType) -> None:
    with forced(SMALL):
        check_wgrad((5, 0, 64), 3, 40, 72, function=module.wgrad)
        check_wgrad((5, 0, 64), 3, 40, 72, gathered="x", out_dtype=torch.float32, function=module.wgrad)


def row_movement(module: ModuleType) -> None:
    check_rows(Rows(40, 3, 3, 33, torch.bfloat16), module)
    check_long_sums(torch.bfloat16, module)


def act_backwards(module: ModuleType) -> None:
    for name in ("gelu", "swiglu"):
        check_act_backward(ActBackward((30, 0, 5), 6, 1030, name), module.act_backward)


def tile_maps(module: ModuleType) -> None:
    check_tile_map((33, 0, 5), 7, module.tile_map)


CHECKS: dict[ModuleType, Callable[[ModuleType], None]] = {
    grouped_gemm: products,
    wgrad: gradients,
    rows: row_movement,
    activation: act_backwards,
    tiles: tile_maps,
}


@dataclass(frozen=True)
class Mutation:
    """`old`, which `module` has once, becomes `new`."""

    name: str
    module: ModuleType
    old: str
    new: str


GEMM, WGRAD, ROWS = (partial(Mutation, module=module) for module in (grouped_gemm, wgrad, rows))
ACT, TILES = (partial(Mutation, module=module) for module in (activation, tiles))
MUTATIONS = (
    GEMM("K mask dropped", old="inner_mask = inner < K - k", new="inner_mask = inner >= 0"),
    GEMM(
        "tail not zeroed",
        old="columns[None, :], acc.to(dtype), mask=mask)",
        new="columns[None, :], acc.to(dtype), mask=mask & (group >= 0))",
    ),
    GEMM(
        "gate halves swapped",
        old="swiglu(gate.to(tl.float32), up.to(tl.float32))",
        new="swiglu(up.to(tl.float32), gate.to(tl.float32))",
    ),
    GEMM("last column tile skipped", old="column_tiles = tl.cdiv(N, BLOCK_N)", new="column_tiles = N // BLOCK_N"),
    GEMM("row scale of the tail read", old="mask=row_mask & (group >= 0), other=0.0)", new="mask=row_mask, other=0.0)"),
    GEMM("gather ignored", old="source = tl.load(gather + rows, mask=row_mask, other=0)", new="source = rows"),
    GEMM(
        "sums rounded to the input's dtype",
        old="acc = tl.dot(a, b, acc, input_precision=PRECISION)",
        new="acc = tl.dot(a, b, acc, input_precision=PRECISION).to(dtype).to(tl.float32)",
    ),
    WGRAD(
        "empty group not zeroed",
        old="acc.to(dw.dtype.element_ty), mask=mask)",
        new="acc.to(dw.dtype.element_ty), mask=mask & (end > start))",
    ),
    WGRAD("row mask dropped", old="row_mask = rows < end", new="row_mask = rows >= 0"),
    WGRAD("last column tile skipped", old="column_tiles = tl.cdiv(N, BLOCK_N)", new="column_tiles = N // BLOCK_N"),
    WGRAD("last row tile skipped", old="row_tiles = tl.cdiv(K, BLOCK_K)", new="row_tiles = K // BLOCK_K"),
    WGRAD("given gradient overwritten", old="        if ACCUMULATE:\n", new="        if False:\n"),
    ROWS(
        "gathered tail not zeroed",
        old="columns[None, :], values, mask=row_mask[:, None]",
        new="columns[None, :], values, mask=routed[:, None]",
    ),
    ROWS("combined tail read", old="routed = token_mask & (row < routed_rows)", new="routed = token_mask"),
    ROWS(
        "combined sums rounded",
        old="acc += values",
        new="acc = (acc + values).to(out.dtype.element_ty).to(tl.float32)",
    ),
    ROWS(
        "weights' tail read",
        old="routed = slot_mask & (row < tl.load(offsets + num_groups - 1))",
        new="routed = slot_mask",
    ),
    ACT("gate halves swapped", old="value = swiglu(h, up)", new="value = swiglu(up, h)"),
    ACT("slopes swapped", old="slope, slope_up = swiglu_slopes", new="slope_up, slope = swiglu_slopes"),
    ACT("tail read", old="routed = row_mask & (rows < tl.load(offsets + num_groups - 1))", new="routed = row_mask"),
    ACT("weight gradient scaled", old="acc += grad * value", new="acc += scale * grad * value"),
    ACT("weight gradient of the last block", old="acc += grad * value", new="acc = grad * value"),
    TILES(
        "last tile of a group dropped", old="ends - starts + block_m - 1) // block_m", new="ends - starts) // block_m"
    ),
)


def copy_of(module: ModuleType, folder: Path, old: str = "", new: str = "") -> ModuleType:
    """`module` imported again from a changed copy of its source."""
    text = Path(module.__file__).read_text()
    if old:
        assert text.count(old) == 1, f"{module.__name__} has no single {old!r} any more"
        text = text.replace(old, new)
    path = folder / f"changed_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.module.__name__.rpartition('.')[2]}: {m.name}")
def test_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    changed = copy_of(mutation.module, tmp_path, mutation.old, mutation.new)
    with pytest.raises(AssertionError):
        CHECKS[mutation.module](changed)


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_an_unchanged_copy_passes(module: ModuleType, tmp_path: Path) -> None:
    CHECKS[module](copy_of(module, tmp_path))
