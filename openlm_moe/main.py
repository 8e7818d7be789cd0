"""The command: options -> host -> run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from openlm_moe.errors import UserError
from openlm_moe.options import Parser

# Each module has `main(argv) -> exit code` and reads all flags but --host itself.
HOSTS = {"builtin": "openlm_moe.hosts.builtin.run", "open_lm": "openlm_moe.hosts.open_lm"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the host that --host names with the other flags; returns the exit code (2: bad input)."""
    parser = Parser(prog="openlm_moe.main", add_help=False)
    parser.add_argument("--host", choices=tuple(HOSTS), default="builtin")
    chosen, flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        if importlib.util.find_spec(HOSTS[chosen.host]) is None:
            raise UserError(f"--host {chosen.host} is not part of this installation; use --host builtin")
        return importlib.import_module(HOSTS[chosen.host]).main(flags)
    except UserError as error:
        print(f"openlm_moe.main: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
