"""`python -m openlm_moe.convert NAME ...`: checkpoints and weights from one format to another."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from openlm_moe.errors import UserError
from openlm_moe.options import Parser

# name -> (module with `add_arguments(parser)` and `run(arguments)`, what it does)
COMMANDS = {
    "dcp-to-pt": ("openlm_moe.convert.dcp_to_pt", "sharded checkpoint -> open_lm's epoch_N.pt and optimizer_N.pt"),
    "megablocks-to-openlm": ("openlm_moe.convert.megablocks", "open_lm's epoch_N.pt with MegaBlocks' layers -> ours"),
    "upcycle": ("openlm_moe.convert.upcycle", "dense open_lm epoch_N.pt -> mixture of experts, same outputs"),
    "pt-to-dcp": ("openlm_moe.convert.pt_to_dcp", "open_lm's epoch_N.pt -> sharded checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one converter; returns the exit code: 2 after a user's mistake, told in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    overview = Parser(prog="openlm_moe.convert", description=__doc__, epilog=_listed(), add_help=not _named(argv))
    overview.add_argument("name", choices=tuple(COMMANDS), help="the conversion")
    name = overview.parse_args(argv[:1]).name
    module = importlib.import_module(COMMANDS[name][0])
    parser = Parser(prog=f"openlm_moe.convert {name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        print(f"openlm_moe.convert {name}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _named(argv: list[str]) -> bool:
    return bool(argv) and argv[0] in COMMANDS


def _listed() -> str:
    return "; ".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items())


if __name__ == "__main__":
    sys.exit(main())
