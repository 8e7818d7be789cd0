"""Logs steps first..last of one run to wandb: FOLDER FIRST LAST OPTIONS (JSON). Prints seconds as JSON in the end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from openlm_moe.config import MoEConfig
from openlm_moe.telemetry import Sinks, expert_loads, wandb_sink

TOKENS_PER_STEP = 1000


def pause(folder: Path, sinks: Sinks) -> None:
    """Tells the test that wandb has begun the run, and waits until it says to go on."""
    while sinks._sinks["wandb"]._run is None:
        time.sleep(0.05)
    (folder / "paused").touch()
    while not (folder / "go_on").exists():
        time.sleep(0.05)


def main() -> None:
    folder, first, last, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    wandb_sink.INIT_TIMEOUT = options.get("init_timeout", wandb_sink.INIT_TIMEOUT)
    wandb_sink.FINISH_TIMEOUT = options.get("finish_timeout", wandb_sink.FINISH_TIMEOUT)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    sinks = Sinks(folder, ["wandb"], resume_step=first - 1, rank=options.get("rank", 0), project="tests")
    opened = time.perf_counter()
    sinks.config({"moe": MoEConfig(layers=(0, 2)).to_dict(), "lr": 3e-4})
    slowest = 0.0
    for step in range(first, last + 1):
        before = time.perf_counter()
        values = {"train/loss": 10.0 / step, **expert_loads({0: [1, 2, 3, step], 2: [1, 1, 1, 1]})}
        sinks.log(values, step=step, tokens=step * TOKENS_PER_STEP)
        slowest = max(slowest, time.perf_counter() - before)
        if step == options.get("pause_after"):
            pause(folder, sinks)
    if options.get("die"):
        os._exit(9)
    logged = time.perf_counter()
    sinks.close()
    closed = time.perf_counter()
    print(json.dumps({"open": opened - start, "slowest_log": slowest, "close": closed - logged}))


if __name__ == "__main__":
    main()
