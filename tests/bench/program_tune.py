"""Run by `test_tune.py` under TRITON_INTERPRET=1: `program_tune.py wrong` and `program_tune.py use`; prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openlm_moe.bench import tune
from openlm_moe.bench.products import products
from openlm_moe.bench.shapes import Shape
from openlm_moe_kernels.gpu import tables
from openlm_moe_kernels.gpu.launch import launcher
from openlm_moe_kernels.gpu.wgrad import wgrad

LAYER = Shape(dim=32, hidden=48, experts=3, top_k=1, tokens=40)
WRONG_BLOCK = 64


@contextmanager
def some_launches_do_nothing() -> Iterator[None]:
    """Tiles of `WRONG_BLOCK` rows are launched without effect: nothing is faster, and the output is what was there."""

    def wrap(inner):
        def launch(kernel, grid, device, arguments):
            if kernel.fn.__name__ != "_wgrad" or arguments["BLOCK_M"] != WRONG_BLOCK:
                inner(kernel, grid, device, arguments)

        return launch

    with launcher(wrap):
        yield


def wrong() -> dict:
    """Tunes with a choice that is wrong, and again without the check, to show that it would win."""
    table = tables.load("sm_90")
    store = products(LAYER, torch.float32)[4]
    found = {}
    for name in ("checked", "unchecked"):
        if name == "unchecked":
            tune.wrong = lambda case: None
        with some_launches_do_nothing():
            search = tune.tune_entry(table, store.entry(table), [store], "cpu", rounds=3, steps=1)
        found[name] = {
            "winner": search.best.block_m,
            "refused": sorted({config.block_m for config in search.rejected}),
            "why": sorted(set(search.rejected.values())),
        }
    return found


def use() -> dict:
    """The tile sizes that a launch takes from the table that the environment names."""
    taken = []

    def wrap(inner):
        def launch(kernel, grid, device, arguments):
            taken.append([arguments[f"BLOCK_{letter}"] for letter in "MNK"])
            inner(kernel, grid, device, arguments)

        return launch

    x, dy = torch.randn(40, 32), torch.randn(40, 48)
    with launcher(wrap):
        dw = wgrad(x, dy, torch.tensor([40], dtype=torch.int32))
    return {"tiles": taken, "error": float((dw[0] - x.T @ dy).norm() / dw.norm())}


print(json.dumps({"wrong": wrong, "use": use}[sys.argv[1]]()))
