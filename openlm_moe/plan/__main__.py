"""`python -m openlm_moe.plan`: parameters, memory, communication and step time of a job, before it is submitted."""

from __future__ import annotations

import sys

from openlm_moe.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
