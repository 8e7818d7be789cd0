"""`python -m openlm_moe.bench NAME ...`: timings and counts on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openlm_moe.commands import run_command

# name -> (module with `add_arguments(parser)` and `run(arguments)`, what it measures)
COMMANDS = {
    "layer": ("openlm_moe.bench.layer", "one MoE feed-forward, forward and backward, against a dense one of its FLOPs"),
    "scale": ("openlm_moe.bench.scale", "step time and bytes of each collective under expert parallelism"),
    "kernels": ("openlm_moe.bench.kernels", "the grouped products against dense ones of the same FLOPs"),
    "tune": ("openlm_moe.bench.tune", "launch parameters of the kernels on this GPU, written as a kernel table"),
    "model": ("openlm_moe.bench.model", "training steps of a whole model, dense against mixture of experts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of `COMMANDS`; returns the exit code: 2 after a user's mistake, told in one line."""
    return run_command("openlm_moe.bench", __doc__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
