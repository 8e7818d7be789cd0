"""One MoE feed-forward against a dense one of the same FLOPs and other ways to write it, into record.jsonl.

    python -m results.layer.measure --routing both         any flags of `python -m openlm_moe.bench layer` but --json

Wants an otherwise idle machine, and some ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from results import records

RECORDS = Path(__file__).parent / "record.jsonl"


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "layer.json"
        subprocess.run([sys.executable, "-m", "openlm_moe.bench", "layer", *flags, "--json", made], check=True)
        for record in json.loads(made.read_text()):
            records.append(RECORDS, {**record, **records.origin()})


if __name__ == "__main__":
    main(sys.argv[1:])
