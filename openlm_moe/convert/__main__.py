"""`python -m openlm_moe.convert NAME ...`: checkpoints and weights from one format to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openlm_moe.commands import run_command

# name -> (module with `add_arguments(parser)` and `run(arguments)`, what it does)
COMMANDS = {
    "dcp-to-pt": ("openlm_moe.convert.dcp_to_pt", "sharded checkpoint -> open_lm's epoch_N.pt and optimizer_N.pt"),
    "hf-to-openlm": ("openlm_moe.convert.hf_to_openlm", "Hugging Face Mixtral -> our checkpoint and model file"),
    "megablocks-to-openlm": ("openlm_moe.convert.megablocks", "open_lm's epoch_N.pt with MegaBlocks' layers -> ours"),
    "openlm-to-hf": ("openlm_moe.convert.openlm_to_hf", "our checkpoint -> Hugging Face Mixtral, or custom model"),
    "upcycle": ("openlm_moe.convert.upcycle", "dense open_lm epoch_N.pt -> mixture of experts, same outputs"),
    "pt-to-dcp": ("openlm_moe.convert.pt_to_dcp", "open_lm's epoch_N.pt -> sharded checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of `COMMANDS`; returns the exit code: 2 after a user's mistake, told in one line."""
    return run_command("openlm_moe.convert", __doc__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
