"""A run that saves every second step and can be killed or stopped. Arguments: folder, steps, and what happens.

In step 4, `nothing`, `touch` (rank 0 makes the stop file), `signal` (rank 1 gets SIGTERM), `raise` (rank 1 fails) or
`die` (rank 1 is killed).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import toy

from openlm_moe import MoEConfig
from openlm_moe.parallel import Checkpointer, StopRequest, clip_grad_norm_, make_layout, parallelize

CONFIG = MoEConfig(num_experts=4, ffn_dim=24)


def happen(what: str, rank: int, stop_file: Path) -> None:
    if what == "touch" and rank == 0:
        stop_file.touch()
    if what == "signal" and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "raise" and rank == 1:
        raise RuntimeError("rank 1 ran into trouble")
    if what == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def program(arguments: list[str]) -> dict[str, Any]:
    folder, steps, what = Path(arguments[0]), int(arguments[1]), arguments[2]
    layout = make_layout(True, False, 2, CONFIG.num_experts, torch.device("cpu"))
    model = parallelize(toy.build(CONFIG, torch.float32, "dm"), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2)
    stop = StopRequest(folder / "STOP")
    step, path = 0, checkpointer.latest()
    if path is not None:
        step = checkpointer.load(path, model, optimizer)["step"]
    print("STARTED", flush=True)
    first, stopped = step, False
    while step < steps and not stopped:
        tokens = toy.batch(step, 6)
        toy.train_step(model, toy.share_of_rank(tokens, layout.rank, layout.world_size), tokens[:, 1:].numel())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if step == 4:
            happen(what, layout.rank, stop.file)
        step += 1
        stopped = stop.agreed()
        if step % 2 == 0 or stopped:
            checkpointer.save(step, model, optimizer, {"step": step})
    checkpointer.close()
    stop.close()
    weights = toy.weights(model)
    if layout.rank == 0 and step == steps:
        torch.save(weights, folder / "weights.pt")
    return {
        "first": first,
        "last": step,
        "stopped": stopped,
        "same step": toy.same_on_all_ranks(torch.tensor(step)),
        "kept": sorted(p.name for p in (folder / "checkpoints").iterdir()),
    }


if __name__ == "__main__":
    toy.main(program)
