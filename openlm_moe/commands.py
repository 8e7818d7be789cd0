"""Commands made of subcommands, such as `python -m openlm_moe.convert NAME ...`; each is a module, imported on use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from openlm_moe.errors import UserError
from openlm_moe.options import Parser

# name -> (module with `add_arguments(parser)` and `run(arguments)`, what it does)
Commands = Mapping[str, tuple[str, str]]


def run_command(prog: str, description: str, commands: Commands, argv: Sequence[str] | None) -> int:
    """Runs the subcommand that `argv` names; returns the exit code: 2 after a user's mistake, told in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in commands.items())
    known = bool(argv) and argv[0] in commands
    overview = Parser(prog=prog, description=description, epilog=listed, add_help=not known)
    overview.add_argument("name", choices=tuple(commands), help="what to do")
    name = overview.parse_args(argv[:1]).name
    module = importlib.import_module(commands[name][0])
    parser = Parser(prog=f"{prog} {name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        print(f"{prog} {name}: error: {error}", file=sys.stderr)
        return 2
    return 0
