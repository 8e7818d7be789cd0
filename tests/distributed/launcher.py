"""Starts process groups quickly: imports torch once, then forks the ranks of each run that it is asked for.

Reads one JSON request a line on stdin: {"program", "arguments", "world", "env", "timeout", "folder", "kill"}. Rank r's
output goes to <folder>/out.r and err.r. `kill` is null or [rank, seconds]: that rank gets SIGKILL after that time.
Answers with one JSON line: {"codes": [exit code a rank], "timed_out": bool, "forced": bool}. When a rank fails, the
others get some time to end by themselves, as under torchrun, and are killed (`forced`) if they do not.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

GRACE = 15.0


def main() -> None:
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import openlm_moe
    import openlm_moe.parallel  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(request: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = request["world"]
    children = [start(request, rank, port) for rank in range(world)]
    codes: dict[int, int] = {}
    begin, victim = time.monotonic(), request["kill"]
    deadline, timed_out, forced = begin + request["timeout"], False, False
    while len(codes) < world:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                deadline = min(deadline, time.monotonic() + GRACE)
        elif victim is not None and time.monotonic() > begin + victim[1]:
            if children[victim[0]] not in codes:
                os.kill(children[victim[0]], signal.SIGKILL)
            victim = None
        elif time.monotonic() > deadline:
            timed_out, forced = not any(codes.values()), True
            for child in set(children) - codes.keys():
                os.killpg(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return {"codes": [codes[child] for child in children], "timed_out": timed_out, "forced": forced}


def start(request: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for descriptor, name in ((1, f"out.{rank}"), (2, f"err.{rank}")):
            file = os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        world = str(request["world"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **request["env"])
        sys.argv = [request["program"], *request["arguments"]]
        sys.path.insert(0, str(Path(request["program"]).parent))
        runpy.run_path(request["program"], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
