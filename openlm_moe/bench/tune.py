"""Measures launch parameters of the Triton kernels on this machine's GPU and writes them as a kernel table, a JSON file
like the shipped ones. Name the layers that you train: --shape or --layer. To use the table, set
OPENLM_MOE_KERNEL_TABLE=FILE wherever you train on this kind of GPU. The table has the shipped one's entries, which are
told apart by activation, width of the dtype and bounds on columns and on rows per expert, never by an exact number of
tokens; where nothing was measured an entry stays as shipped. A configuration is timed only after its results agreed
with the reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from openlm_moe.bench.measure import interleaved, machine
from openlm_moe.bench.shapes import SHAPES, Shape
from openlm_moe.errors import UserError
from openlm_moe.options import DTYPES

if TYPE_CHECKING:
    from openlm_moe.bench.products import Case, Product
    from openlm_moe_kernels.gpu.tables import Config, Entry, Table

FEW_ROWS = 32  # rows per expert of the second measurement: small batches, and many experts
MARGIN = 0.02  # a challenger must be faster by this share, or the order of equals would decide
MIN_SECONDS = 2e-3  # a shorter launch is repeated, so that launching is not what is timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="a published layer; may be repeated")
    parser.add_argument(
        "--layer",
        action="append",
        type=layer,
        metavar="D,F,E,K[,swiglu]",
        help="a layer of yours: model dim, expert hidden dim, experts, top-k; GELU without the word; may be repeated",
    )
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="repeatable; bf16 and fp32")
    parser.add_argument(
        "--tokens",
        action="append",
        type=int,
        help=f"tokens per launch; may be repeated (default: 4096, and as many as give an expert {FEW_ROWS} rows)",
    )
    parser.add_argument("--kernel", choices=("grouped_gemm", "wgrad"), help="tune only this kernel")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians decide (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of the search from a shipped entry (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table (default: ARCHITECTURE.json)")


def layer(text: str) -> Shape:
    """ "768,3072,8,2,swiglu" -> Shape."""
    numbers = text.removesuffix(",swiglu").split(",")
    activation = "swiglu" if text.endswith(",swiglu") else "gelu"
    sizes = [int(number) for number in numbers if number.isdecimal()]
    if len(sizes) != len(numbers) or len(sizes) != 4 or min(sizes) < 1 or sizes[3] > sizes[2]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not D,F,E,K in whole numbers with K at most E, or that and swiglu"
        )
    return Shape(*sizes, activation)


def run(arguments: argparse.Namespace) -> None:
    """Tunes the table of this machine's GPU; UserError where there is none that the kernels run on."""
    if min(arguments.rounds, arguments.steps, *(arguments.tokens or [1])) < 1:
        raise UserError("--rounds, --steps and --tokens must be 1 or more")
    dtypes = [DTYPES[name] for name in arguments.dtype or ("bf16", "fp32")]
    device = require_device(dtypes)
    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it first")
    from openlm_moe.bench.products import products
    from openlm_moe_kernels.gpu import tables

    architecture = tables.architecture_of(torch.device(device))
    table = replace(tables.load(architecture), architecture=architecture)
    wanted = [
        product
        for shape in layers(arguments)
        for dtype in dtypes
        for product in products(shape, dtype)
        if arguments.kernel in (None, product.kernel)
    ]
    print(f"{machine(device)}; {architecture}: {len(wanted)} products", flush=True)
    tuned = tune(table, wanted, device, arguments.rounds, arguments.steps)
    out = arguments.out or Path(f"{architecture}.json")
    try:
        out.write_text(tables.render(tuned), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; name another file") from error
    print(f"\n{out} is written. To train with it: {tables.OVERRIDE}={out.resolve()}")


def require_device(dtypes: list[torch.dtype]) -> str:
    """Where kernels run here: "cuda", or in Triton's interpreter, whose times say nothing of a GPU, "cpu"."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton is not installed, so there are no kernels to tune: pip install 'openlm-moe[triton]'")
    from openlm_moe_kernels import triton_backend
    from openlm_moe_kernels.gpu.launch import interpreted

    device = "cpu" if interpreted() else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU is visible to torch here; launch parameters are measured on the GPU that will train")
    for dtype in dtypes:
        if reason := triton_backend.unsupported(torch.device(device), dtype):
            raise UserError(f"the Triton kernels cannot run here: {reason}")
    return device


def layers(arguments: argparse.Namespace) -> list[Shape]:
    """The layers to measure, each with few and with many rows per expert unless --tokens says how many."""
    chosen = [SHAPES[name] for name in arguments.shape or ()] + (arguments.layer or [])
    return [
        replace(shape, tokens=tokens)
        for shape in chosen or SHAPES.values()
        for tokens in arguments.tokens or (shape.tokens, max(1, FEW_ROWS * shape.experts // shape.top_k))
    ]


@dataclass
class Search:
    """One entry's search: what was rejected and why, and the winner's time over the shipped configuration's."""

    entry: Entry
    best: Config
    tried: int = 0
    ratio: float = 1.0
    rejected: dict[Config, str] = field(default_factory=dict)


def tune(table: Table, wanted: list[Product], device: str, rounds: int, steps: int) -> Table:
    """`table` with each entry's configuration replaced by the fastest right one on those of `wanted` that it serves."""
    served: dict[Entry, list[Product]] = defaultdict(list)
    for product in wanted:
        served[product.entry(table)].append(product)
    entries = []
    for entry in table.entries:
        if entry in served:
            search = tune_entry(table, entry, served[entry], device, rounds, steps)
            print(report(search, len(served[entry])), flush=True)
            entry = replace(entry, config=search.best)
        entries.append(entry)
    return replace(table, entries=tuple(entries))


def tune_entry(table: Table, entry: Entry, served: list[Product], device: str, rounds: int, steps: int) -> Search:
    """Goes from the entry's configuration to the fastest of its neighbours, and on while that is faster."""
    search = Search(entry, entry.config)
    seen = {entry.config}
    for _ in range(steps):
        challengers = [config for config in neighbours(table, entry, search.best) if config not in seen]
        seen.update(challengers)
        times = race([search.best, *challengers], table, entry, served, device, rounds, search.rejected)
        search.tried = len(seen)
        if not times:
            raise UserError(
                f"no configuration of {entry.kernel} near {search.best} computes what the reference does; train with "
                "--moe-backend torch, and please report the output of python -m openlm_moe.doctor"
            )
        fastest = min(times, key=times.__getitem__)
        before = times.get(search.best, math.inf)
        if times[fastest] > (1 - MARGIN) * before:
            break
        search.ratio *= times[fastest] / before if before < math.inf else 1.0
        search.best = fastest
    return search


def race(
    configs: list[Config],
    table: Table,
    entry: Entry,
    served: list[Product],
    device: str,
    rounds: int,
    rejected: dict[Config, str],
) -> dict[Config, float]:
    """Seconds, the geometric mean over products of medians, of the configurations that compute all products right."""
    from openlm_moe_kernels.gpu import tables

    logs = {config: 0.0 for config in configs}
    for product in served:
        forced = {config: tables.only(table, replace(entry, config=config)) for config in logs}
        try:
            seconds = race_product(product, forced, device, rounds, rejected)
        except torch.OutOfMemoryError as error:
            raise UserError(f"{product.layer} does not fit this GPU's memory; choose smaller layers") from error
        logs = {config: logs[config] + math.log(value) / len(served) for config, value in seconds.items()}
    return {config: math.exp(value) for config, value in logs.items()}


def race_product(
    product: Product, forced: dict[Config, Table], device: str, rounds: int, rejected: dict[Config, str]
) -> dict[Config, float]:
    """Median seconds of the configurations that compute one product right; the others go into `rejected`."""
    from openlm_moe.bench.products import build
    from openlm_moe_kernels.gpu import tables

    case = build(product, device)
    right = {}
    for config, table in forced.items():
        with tables.use(table):
            reason = wrong(case)
        if reason is None:
            right[config] = table
        else:
            rejected[config] = reason
    if not right:
        return {}
    repeats = launches_worth_timing(case, next(iter(right.values())), device)
    runs = {str(config): partial(launch, case, table, repeats) for config, table in right.items()}
    seconds = interleaved(runs, rounds, device)
    return {config: statistics.median(seconds[str(config)]) / repeats for config in right}


def wrong(case: Case) -> str | None:
    """Why the configuration in use must not win: it cannot be launched, or its result is not the reference's."""
    from triton.errors import TritonError

    try:
        error = case.error()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # not the configuration's doing, or the device is lost
    except (TritonError, RuntimeError) as failure:  # too much shared memory, or the compiler gave up
        return f"does not run: {(str(failure).strip().splitlines() or [type(failure).__name__])[0]}"
    return None if error <= case.bound else f"is off by {error:.2g} of the result, at most {case.bound:.0e} is rounding"


def launch(case: Case, table: Table, times: int) -> None:
    from openlm_moe_kernels.gpu import tables

    with tables.use(table):
        for _ in range(times):
            case.run()


def launches_worth_timing(case: Case, table: Table, device: str) -> int:
    """How many launches of a product the clock needs; on a CPU one."""
    if device == "cpu":
        return 1
    seconds = interleaved({"one": partial(launch, case, table, 1)}, 1, device)["one"][0]
    return max(1, min(100, math.ceil(MIN_SECONDS / seconds)))


# In order: a step of the search goes to the value before or after.
CHOICES: dict[str, tuple[int, ...]] = {
    "block_m": (32, 64, 128),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4, 5),
    "group": (4, 8, 16),
    "programs_per_sm": (0, 1, 2),
}


def neighbours(table: Table, entry: Entry, config: Config) -> list[Config]:
    """Configurations one step away, and two of the tile's sides at once, that registers and memory have room for."""
    steps = {}
    for name, values in CHOICES.items():
        at = values.index(getattr(config, name))
        steps[name] = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
    found = [replace(config, **{name: value}) for name, values in steps.items() for value in values]
    sides = ("block_m", "block_n", "block_k")
    found += [
        replace(config, **{one: a, other: b})
        for i, one in enumerate(sides)
        for other in sides[i + 1 :]
        for a in steps[one]
        for b in steps[other]
    ]
    has_descriptors = table.architecture.startswith("sm_") and int(table.architecture[3:]) >= 90
    if entry.kernel == "grouped_gemm" and has_descriptors:
        found.append(replace(config, tma=not config.tma))
    return [other for other in found if fits(table, entry, other)]


def fits(table: Table, entry: Entry, config: Config) -> bool:
    """Whether the accumulators leave a thread registers for anything else, and the stages fit into shared memory."""
    halves = 2 if "swiglu" in entry.variants else 1
    outer, inner = config.block_m, config.block_k
    if entry.kernel == "wgrad":
        outer, inner = inner, outer
    wide = config.block_n * halves
    threads = config.warps * (64 if table.architecture.startswith("gfx") else 32)
    staged = (outer + wide) * inner * entry.bits // 8 * max(1, config.stages - 1)
    return outer * wide <= 128 * threads and staged <= table.shared_memory


def report(search: Search, products: int) -> str:
    """What came of one entry, and each configuration that was refused, in lines."""
    entry = search.entry
    bounds = [f"{name} {bound}" for name in ("max_rows", "max_columns") if (bound := getattr(entry, name))]
    head = " ".join([entry.kernel, "/".join(entry.variants), f"{entry.bits} bits", *bounds])
    change = "kept" if search.best == entry.config else f"-> {search.best}, {search.ratio:.2f} of its time"
    lines = [f"{head}, {products} products, {search.tried} configurations: {entry.config} {change}"]
    return "\n".join(lines + [f"  refused {config}: {why}" for config, why in search.rejected.items()])
