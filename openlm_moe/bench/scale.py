"""Step time and bytes of each collective for every expert-parallel size that fits, on this machine's devices.

Times are ratios to the first size: on a CPU, where ranks share the cores, only these say something. Bytes are counted
as the step runs, per rank on average, and stand beside the closed forms of `openlm_moe.plan`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.options import MOE_OPTIONS, add_options, moe_config_from

KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="open_lm_11m", help="open_lm's model name, or a JSON file (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes on this machine (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--sequences", type=int, default=2, help="sequences a rank and step (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each size (%(default)s)")
    parser.add_argument("--replicate", action="store_true", help="replicate instead of sharding (no FSDP)")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    add_options(parser, MOE_OPTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Measures in processes of its own, and prints a table."""
    moe = moe_config_from(arguments)
    sizes = [n for n in range(1, arguments.ranks + 1) if arguments.ranks % n == 0 and moe.num_experts % n == 0]
    if moe.num_experts == 0 or arguments.ranks < 2:
        raise UserError("bench scale needs --ranks of at least 2 and a model with experts")
    params = load_model_params(arguments.model).to_json() | {"seq_len": arguments.seq_len}
    request = {
        "params": params,
        "moe": moe.to_dict(),
        "sizes": sizes,
        "fsdp": not arguments.replicate,
        "sequences": arguments.sequences,
        "steps": arguments.steps,
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    worker = [*launcher, "-m", "--", "openlm_moe.bench.scale_worker", json.dumps(request)]
    # One thread a rank, unless told otherwise: ranks on one CPU would fight for its cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(worker, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"a rank failed; its last words: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    print(json.dumps(found, indent=1) if arguments.json else table(found))


def table(found: list[dict[str, Any]]) -> str:
    """One row a size: time against the first, and for each kind of collective counted bytes over computed ones."""
    rows = [
        f"{'EP':>3} {'step ms':>9} {'ratio':>6}  " + "  ".join(f"{f'{kind} MB (of computed)':>34}" for kind in KINDS)
    ]
    for one in found:
        cells = []
        for kind in KINDS:
            counted, computed = one["counted"].get(kind, 0.0), one["computed"].get(kind, 0.0)
            share = f"{counted / computed:.4f}" if computed else "none" if not counted else "unexpected"
            cells.append(f"{f'{counted / 1e6:.3f} ({share})':>34}")
        ratio = one["seconds"] / found[0]["seconds"]
        rows.append(f"{one['ep']:>3} {one['seconds'] * 1e3:>9.1f} {ratio:>6.2f}  " + "  ".join(cells))
    return "\n".join(rows)
