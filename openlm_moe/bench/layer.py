"""Forward and backward of one MoE feed-forward against a dense one of the same FLOPs, and other ways to write it.

Contenders take turns within each round; a ratio is the median over rounds of the time over the dense time of that
round. On a CPU everything is measured twice, with glibc's malloc tuned to keep its memory and as it is by default.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from openlm_moe.bench import contenders
from openlm_moe.bench.measure import in_own_process, interleaved, machine, summary, write_json
from openlm_moe.bench.shapes import Shape, add_shape_arguments, chosen_shapes, routings
from openlm_moe.options import DTYPES

FLOOR, OURS = "dense", "openlm_moe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    parser.add_argument("--malloc", choices=("tuned", "untuned", "both"), default="both", help="on a CPU (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measures each shape, dtype and routing in a process of its own, and prints a table."""
    mallocs = ("tuned", "untuned") if arguments.malloc == "both" else (arguments.malloc,)
    records = []
    print(machine(arguments.device))
    for name, shape in chosen_shapes(arguments).items():
        for dtype in arguments.dtype or ("fp32", "bf16"):
            for routing in routings(arguments):
                for malloc in mallocs if arguments.device == "cpu" else ("tuned",):
                    request = {
                        "shape": vars(shape),
                        "dtype": dtype,
                        "routing": routing,
                        "device": arguments.device,
                        "rounds": arguments.rounds,
                        "backend": arguments.backend,
                    }
                    found = in_own_process(__name__, request, malloc == "tuned")
                    record = {"name": name, "malloc": malloc, **request, **found}
                    records.append(record)
                    print(table(record), flush=True)
    write_json(arguments.json, records)


def measure(shape: dict[str, Any], dtype: str, routing: str, device: str, rounds: int, backend: str) -> dict[str, Any]:
    """Times of every contender, and what ours saves for backward."""
    torch.manual_seed(0)
    layer_shape = Shape(**shape)
    x = torch.randn(layer_shape.tokens, layer_shape.dim, dtype=DTYPES[dtype], device=device, requires_grad=True)
    dout = torch.randn_like(x)
    weights, ids = contenders.routing(layer_shape, routing, device)
    made = {
        FLOOR: contenders.dense(layer_shape, DTYPES[dtype], device),
        OURS: contenders.ours(layer_shape, DTYPES[dtype], device, backend),
        **{name: make(layer_shape, DTYPES[dtype], device) for name, make in contenders.peers().items()},
    }

    def step(layer: contenders.Layer, parameters: list[Tensor], inputs: list[Tensor]):
        return lambda: torch.autograd.grad(layer(x, weights, ids), [x, *inputs, *parameters], dout)

    steps = {name: step(*made[name], [] if name == FLOOR else [weights]) for name in made}
    found = {"results": summary(interleaved(steps, rounds, device), FLOOR)}
    for name, result in found["results"].items():
        result["tflops"] = 3 * layer_shape.flops / result["ms"] / 1e9
        result["saved_bytes"] = saved_bytes(made[name][0], made[name][1], x, weights, ids)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps[name]()
            result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def saved_bytes(layer: contenders.Layer, parameters: list[Tensor], x: Tensor, weights: Tensor, ids: Tensor) -> int:
    """Bytes kept for backward, each storage once, the parameters not counted."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = max(storages.get(storage.data_ptr(), 0), t.numel() * t.itemsize)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x, weights, ids)
    del out
    return sum(storages.values())


def table(record: dict[str, Any]) -> str:
    """One measurement as text."""
    shape = record["shape"]
    sizes = f"d {shape['dim']}, hidden {shape['hidden']}, E {shape['experts']}, top-{shape['top_k']}"
    malloc = f", malloc {record['malloc']}" if record["device"] == "cpu" else ""
    head = f"\n{record['name']}: {sizes}, T {shape['tokens']}, {record['dtype']}, {record['routing']} routing{malloc}"
    lines = [head, f"  {'':26}{'ms':>9}{'/ dense':>9}{'TFLOP/s':>9}{'saved MiB':>11}"]
    for name, r in record["results"].items():
        saved = r["saved_bytes"] / 2**20
        lines.append(f"  {name:26}{r['ms']:9.1f}{r['ratio']:9.3f}{r['tflops']:9.3f}{saved:11.1f}")
    return "\n".join(lines)
