"""What `codegen` compiles: calls of the triton backend on meta tensors, for every entry of an architecture's table.

Shape letters as in `backend.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openlm_moe_kernels.gpu import activation, grouped_gemm, rows, tables, tiles, wgrad
from openlm_moe_kernels.plan import RoutePlan
from openlm_moe_kernels.routing import route_plan

TOKENS, TOP_K, EXPERTS = 1024, 2, 8
ALIGNED = (1024, 2048)  # D, F
UNALIGNED = (36, 100)  # no asynchronous copy is possible, and every mask is needed


@dataclass(frozen=True)
class Call:
    """One launch to compile: `run(dtype)` makes it."""

    kernel: str
    case: str
    config: str
    table: tables.Table
    dtypes: tuple[str, ...]
    run: Callable[[torch.dtype], Any]
    product: bool = False
    aligned: bool = True
    fast: bool = False  # in the subset that `make test` compiles


def calls(table: tables.Table) -> Iterator[Call]:
    """Every kernel in every configuration of a table, in the ways that the layer launches it."""
    for entry in table.entries:
        yield from _products(table, entry)
    dtypes = ("bf16", "fp16", "fp32")
    for kernel, cases in _ROW_CASES.items():
        for number, (case, run) in enumerate(cases.items()):
            yield Call(kernel, case, "-", table, dtypes, run, fast=number == 0)


def _products(table: tables.Table, entry: tables.Entry) -> Iterator[Call]:
    config = entry.config
    dtypes = ("bf16", "fp16") if entry.bits == 16 else ("fp32",)
    forced = tables.only(table, entry)
    for variant in entry.variants:
        kernel = entry.kernel if variant in ("none", "store") else f"{entry.kernel} {variant}"
        for number, (case, settings) in enumerate(_PRODUCT_CASES[entry.kernel, variant].items()):
            aligned = settings.get("sizes", ALIGNED) == ALIGNED
            if aligned != entry.aligned:
                continue
            yield Call(
                kernel=kernel,
                case=case,
                config=str(config),
                table=forced,
                dtypes=dtypes,
                run=partial(_wgrad if entry.kernel == "wgrad" else _gemm, **settings),
                product=True,
                aligned=aligned,
                fast=number == 0 and aligned,
            )


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plan() -> RoutePlan:
    return route_plan(_meta(torch.int64, TOKENS, TOP_K), EXPERTS)


def _gemm(
    dtype: torch.dtype,
    *,
    act: str | None = None,
    sizes: tuple[int, int] = ALIGNED,
    gathered: bool = False,
    trans_w: bool = False,
    scaled: bool = False,
    keep_pre: bool = False,
) -> None:
    inner, columns = sizes
    width = 2 * columns if act == "swiglu" else columns
    plan = _plan()
    grouped_gemm.grouped_gemm(
        _meta(dtype, TOKENS if gathered else plan.num_rows, inner),
        _meta(dtype, EXPERTS, *((width, inner) if trans_w else (inner, width))),
        plan.offsets_E,
        trans_w=trans_w,
        gather=plan.tokens_N if gathered else None,
        activation=act,
        row_scale=_meta(torch.float32, plan.num_rows) if scaled else None,
        keep_pre=keep_pre,
    )


def _wgrad(dtype: torch.dtype, *, sizes: tuple[int, int] = ALIGNED, gather: str = "", accumulate: bool = False) -> None:
    plan = _plan()
    wgrad.wgrad(
        _meta(dtype, TOKENS if gather == "x" else plan.num_rows, sizes[0]),
        _meta(dtype, TOKENS if gather == "dy" else plan.num_rows, sizes[1]),
        plan.offsets_E,
        gather_x=plan.tokens_N if gather == "x" else None,
        gather_dy=plan.tokens_N if gather == "dy" else None,
        out=_meta(torch.float32, EXPERTS, *sizes) if accumulate else None,
    )


def _act_backward(dtype: torch.dtype, act: str | None) -> None:
    plan, width = _plan(), ALIGNED[1]
    pre = _meta(dtype, plan.num_rows, 2 * width if act == "swiglu" else width)
    scale = _meta(torch.float32, plan.num_rows)
    activation.act_backward(pre, _meta(dtype, plan.num_rows, width), plan.offsets_E, act, scale)


def _gather_rows(dtype: torch.dtype, scaled: bool) -> None:
    rows.gather_rows(_meta(dtype, TOKENS, 1024), _plan(), _meta(torch.float32, TOKENS, TOP_K) if scaled else None)


def _combine_topk(dtype: torch.dtype, weighted: bool) -> None:
    weights = _meta(torch.float32, TOKENS, TOP_K) if weighted else None
    rows.combine_topk(_meta(dtype, TOKENS * TOP_K, 1024), weights, _plan())


def _combine_topk_dweights(dtype: torch.dtype) -> None:
    rows.combine_topk_dweights(_meta(dtype, TOKENS, 1024), _meta(dtype, TOKENS * TOP_K, 1024), _plan())


def _tile_map(_: torch.dtype, experts: int) -> None:
    tiles.tile_map(_meta(torch.int32, experts), TOKENS)


def _activated(act: str) -> dict[str, dict[str, Any]]:
    return {
        "rows gathered, pre-activation kept": {"act": act, "gathered": True, "keep_pre": True},
        "w transposed, rows scaled": {"act": act, "trans_w": True, "scaled": True},
        "unaligned": {"act": act, "sizes": UNALIGNED, "keep_pre": True},
    }


_PRODUCT_CASES: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("grouped_gemm", "none"): {
        "plain": {},
        "w transposed": {"trans_w": True},
        "rows gathered, w transposed": {"gathered": True, "trans_w": True},
        "rows scaled": {"scaled": True},
        "unaligned": {"sizes": UNALIGNED, "gathered": True},
    },
    ("grouped_gemm", "gelu"): _activated("gelu"),
    ("grouped_gemm", "swiglu"): _activated("swiglu"),
    ("wgrad", "store"): {
        "x gathered": {"gather": "x"},
        "dy gathered": {"gather": "dy"},
        "unaligned": {"sizes": UNALIGNED, "gather": "x"},
    },
    ("wgrad", "add"): {
        "to float32": {"accumulate": True},
        "unaligned": {"accumulate": True, "sizes": UNALIGNED},
    },
}
_ROW_CASES: dict[str, dict[str, Callable[[torch.dtype], None]]] = {
    "act_backward": {str(name): partial(_act_backward, act=name) for name in ("gelu", "swiglu", None)},
    "gather_rows": {"scaled": partial(_gather_rows, scaled=True), "plain": partial(_gather_rows, scaled=False)},
    "combine_topk": {"weighted": partial(_combine_topk, weighted=True), "sum": partial(_combine_topk, weighted=False)},
    "combine_topk_dweights": {"plain": _combine_topk_dweights},
    "tile_map": {f"{experts} experts": partial(_tile_map, experts=experts) for experts in (8, 256)},
}
