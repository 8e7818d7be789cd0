"""Tokens a second of the published dense models and of the same with 8 experts, interleaved, into record.jsonl.

    python -m results.throughput.measure [MODEL ...]      such as open_lm_41m; without a name, all five

Full training steps where parameters, gradients and AdamW's moments of both models fit into the memory that is free;
else the same in bf16 throughout, else forward and backward alone. A model that does not fit even so is left out, and
said to be.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.bench import model as bench
from openlm_moe.bench.measure import in_own_process
from openlm_moe.hosts.builtin.count import count_parameters
from openlm_moe.hosts.builtin.params import load_model_params
from results import records

RECORDS = Path(__file__).parent / "record.jsonl"
MODELS = ("open_lm_41m", "open_lm_87m", "open_lm_160m", "open_lm_410m", "open_lm_830m")
EXPERTS = 8
# step -> bytes a parameter: of fp32 with gradient and two moments, of bf16 with these, of bf16 with gradient
STEPS = {"full": 16, "pure": 8, "no_optimizer": 4}
ACTIVATIONS = 1.5 * 2**30  # room for activations and what else grows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="open_lm's names")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    for name in options.model or MODELS:
        step = fitting(name, free_memory())
        if step is None:
            print(f"{name}: does not fit into {free_memory() / 2**30:.0f} GiB")
            continue
        request: dict[str, Any] = {
            "device": "cpu",
            "model": name,
            "dtype": "bf16",
            "seq_len": options.seq_len,
            "sequences": options.sequences,
            "rounds": options.rounds,
            "moe": MoEConfig(num_experts=EXPERTS).to_dict(),
            "pure": step == "pure",
            "no_optimizer": step == "no_optimizer",
        }
        record = {**request, **in_own_process(bench.__name__, request, tuned_malloc=True), **records.origin()}
        records.append(options.records, record)
        print(bench.table(record), flush=True)


def fitting(name: str, free: float) -> str | None:
    """The first of STEPS that fits into `free` bytes."""
    params = load_model_params(name)
    both = sum(count_parameters(params, MoEConfig(num_experts=e)).total for e in (0, EXPERTS))
    return next((step for step, each in STEPS.items() if both * each + ACTIVATIONS <= free), None)


def free_memory() -> float:
    """Bytes that Linux says a new process can have without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return 1024.0 * int(found[1])


if __name__ == "__main__":
    main()
