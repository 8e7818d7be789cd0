"""`python -m openlm_moe.bench NAME ...`: timings and counts on this machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from openlm_moe.errors import UserError
from openlm_moe.options import Parser

# name -> (module with `add_arguments(parser)` and `run(arguments)`, what it measures)
COMMANDS = {
    "layer": ("openlm_moe.bench.layer", "one MoE feed-forward, forward and backward, against a dense one of its FLOPs"),
    "scale": ("openlm_moe.bench.scale", "step time and bytes of each collective under expert parallelism"),
    "kernels": ("openlm_moe.bench.kernels", "the grouped products against dense ones of the same FLOPs"),
    "model": ("openlm_moe.bench.model", "training steps of a whole model, dense against mixture of experts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns the exit code: 2 after a user's mistake, told in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items())
    known = bool(argv) and argv[0] in COMMANDS
    overview = Parser(prog="openlm_moe.bench", description=__doc__, epilog=listed, add_help=not known)
    overview.add_argument("name", choices=tuple(COMMANDS), help="what to measure")
    name = overview.parse_args(argv[:1]).name
    module = importlib.import_module(COMMANDS[name][0])
    parser = Parser(prog=f"openlm_moe.bench {name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        print(f"openlm_moe.bench {name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
