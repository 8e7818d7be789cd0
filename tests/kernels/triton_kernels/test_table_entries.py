"""Every configuration that a shipped table can choose computes what the formula says, at sizes no tile divides."""

from __future__ import annotations

import pytest
import torch
from triton_cases import Product, check_product, check_wgrad

from openlm_moe_kernels.gpu import tables


def entries() -> dict[str, tuple[tables.Table, tables.Entry]]:
    """One of each kind; architectures share many, and the arithmetic does not depend on the architecture."""
    found: dict[tuple, tuple[tables.Table, tables.Entry]] = {}
    names: dict[tuple, list[str]] = {}
    for architecture in tables.shipped():
        table = tables.load(architecture)
        for entry in table.entries:
            key = (entry.kernel, entry.bits, entry.variants, entry.config, entry.aligned)
            found.setdefault(key, (table, entry))
            names.setdefault(key, []).append(architecture)
    return {f"{'+'.join(dict.fromkeys(names[key]))}-{number}": pair for number, (key, pair) in enumerate(found.items())}


ENTRIES = entries()


def test_every_entry_is_here(nothing_launched) -> None:
    """Each architecture has entries for each kernel, and the names above say whose they are."""
    for architecture in tables.shipped():
        mine = [entry for name, (_, entry) in ENTRIES.items() if architecture in name.split("-")[0].split("+")]
        assert {(entry.kernel, entry.bits) for entry in mine} == {(k, b) for k in tables.VARIANTS for b in (16, 32)}
        shipped = tables.load(architecture).entries
        assert {(e.kernel, e.bits, e.config) for e in shipped} == {(e.kernel, e.bits, e.config) for e in mine}


@pytest.mark.parametrize("name", ENTRIES)
def test_is_right(name: str) -> None:
    table, entry = ENTRIES[name]
    config = entry.config
    # Whole rows of 16 elements for the vector loads and tensor descriptors that aligned entries are for.
    beyond = 16 if entry.aligned else 7
    inner, columns = config.block_k + beyond, config.block_n + beyond
    told = []

    def record(inner_launcher):
        def launch(kernel, grid, device, arguments):
            told.append((kernel.fn.__name__, tuple(arguments.get(f"BLOCK_{letter}") for letter in "MNK")))
            inner_launcher(kernel, grid, device, arguments)

        return launch

    from openlm_moe_kernels.gpu.launch import launcher

    sizes, tail = (config.block_m + 3, 0, 1), 5
    with tables.use(tables.only(table, entry)), launcher(record):
        for dtype in (torch.float32,) if entry.bits == 32 else (torch.bfloat16, torch.float16):
            for variant in entry.variants:
                if entry.kernel == "wgrad":
                    gathered, out_dtype = ("x", None) if variant == "store" else ("dy", torch.float32)
                    check_wgrad(sizes, tail, inner, columns, dtype, gathered, out_dtype)
                else:
                    activation = None if variant == "none" else variant
                    trans_w = gathered = dtype != torch.bfloat16
                    check_product(Product(sizes, tail, inner, columns, dtype, trans_w, gathered, activation))
    blocks = {block for kernel, block in told if kernel == f"_{entry.kernel}"}
    assert blocks == {(config.block_m, config.block_n, config.block_k)}
