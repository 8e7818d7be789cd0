"""The grouped products alone: forward, input gradient and weight gradient of both of a layer's products.

Each is timed against one dense product of the same FLOPs (the floor), torch.nn.functional.grouped_mm and a loop over
groups; all take turns within each round. M rows in E groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe.bench.contenders import routing as make_routing
from openlm_moe.bench.measure import in_own_process, interleaved, machine, summary, write_json
from openlm_moe.bench.shapes import Shape, add_shape_arguments, chosen_shapes, routings
from openlm_moe.options import DTYPES
from openlm_moe_kernels import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad, route_plan

FLOOR = "dense"
Steps = dict[str, Callable[[], Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measures each shape, dtype and routing in a process of its own, and prints a table."""
    records = []
    print(machine(arguments.device))
    for name, shape in chosen_shapes(arguments).items():
        for dtype in arguments.dtype or ("fp32", "bf16"):
            for routing in routings(arguments):
                request = {
                    "shape": vars(shape),
                    "dtype": dtype,
                    "routing": routing,
                    "device": arguments.device,
                    "rounds": arguments.rounds,
                    "backend": arguments.backend,
                }
                record = {"name": name, **request, **in_own_process(__name__, request, tuned_malloc=True)}
                records.append(record)
                print(table(record), flush=True)
    write_json(arguments.json, records)


def measure(shape: dict[str, Any], dtype: str, routing: str, device: str, rounds: int, backend: str) -> dict[str, Any]:
    """Times of the six products of a layer; each product's operands are freed before the next."""
    torch.manual_seed(0)
    layer = Shape(**shape)
    _, ids = make_routing(layer, routing, device)
    offsets = route_plan(ids, layer.experts).offsets_E
    found = {}
    for product, inner, columns in (("up", layer.dim, layer.width), ("down", layer.hidden, layer.dim)):
        x, dy = (torch.randn(layer.rows, n, dtype=DTYPES[dtype], device=device) for n in (inner, columns))
        w = torch.randn(layer.experts, inner, columns, dtype=DTYPES[dtype], device=device)
        for pass_, steps in _passes(x, w, dy, offsets, backend).items():
            results = summary(interleaved(steps, rounds, device), FLOOR)
            for result in results.values():
                result["tflops"] = 2 * layer.rows * inner * columns / result["ms"] / 1e9
            found[f"{product} {pass_}"] = results
    return {"results": found}


def _passes(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor, backend: str) -> dict[str, Steps]:
    ends = offsets.tolist()
    rows = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    how = {"backend": backend}
    return {
        "forward": {
            FLOOR: lambda: x @ w[0],
            "openlm_moe": lambda: grouped_gemm(x, w, offsets, **how),
            "F.grouped_mm": lambda: F.grouped_mm(x, w, offs=offsets),
            "loop": lambda: torch.cat([x[r] @ w[e] for e, r in enumerate(rows)]),
        },
        "dgrad": {
            FLOOR: lambda: dy @ w[0].t(),
            "openlm_moe": lambda: grouped_gemm_dgrad(dy, w, offsets, **how),
            "F.grouped_mm": lambda: F.grouped_mm(dy, w.mT, offs=offsets),
            "loop": lambda: torch.cat([dy[r] @ w[e].t() for e, r in enumerate(rows)]),
        },
        "wgrad": {
            FLOOR: lambda: x.t() @ dy,
            "openlm_moe": lambda: grouped_gemm_wgrad(x, dy, offsets, **how),
            "F.grouped_mm": lambda: F.grouped_mm(x.t(), dy, offs=offsets),
            "loop": lambda: torch.stack([x[r].t() @ dy[r] for r in rows]),
        },
    }


def table(record: dict[str, Any]) -> str:
    """One measurement as text: milliseconds, and the time over the dense product's."""
    shape = record["shape"]
    sizes = f"d {shape['dim']}, hidden {shape['hidden']}, E {shape['experts']}, top-{shape['top_k']}"
    lines = [f"\n{record['name']}: {sizes}, T {shape['tokens']}, {record['dtype']}, {record['routing']} routing"]
    names = next(iter(record["results"].values()))
    lines.append(f"  {'ms (/ dense)':14}" + "".join(f"{name:>20}" for name in names))
    for product, results in record["results"].items():
        cells = (f"{r['ms']:.1f} ({r['ratio']:.2f})" for r in results.values())
        lines.append(f"  {product:14}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)
