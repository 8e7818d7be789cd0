"""`ranks`: real gloo process groups, started by one process a session that has torch imported already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def launcher() -> Iterator[subprocess.Popen[str]]:
    paths = [str(HERE.parents[1]), str(HERE.parents[1] / "kernels"), str(HERE)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, HERE / "launcher.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    yield process
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def ranks(launcher: subprocess.Popen[str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`ranks(world, program, *arguments, timeout=60, env=None)`: what the program found, as `toy.main` prints it.

    Fails the test if a rank fails or the time is up, with the ranks' stderr.
    """

    def start(world: int, program: str, *arguments: Any, timeout: float = 90, env: Any = None) -> dict[str, Any]:
        folder = tmp_path / f"{Path(program).stem}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        request = {
            "program": str(HERE / program),
            "arguments": [str(argument) for argument in arguments],
            "world": world,
            "env": env or {},
            "timeout": timeout,
            "folder": str(folder),
        }
        launcher.stdin.write(json.dumps(request) + "\n")
        launcher.stdin.flush()
        answer = json.loads(launcher.stdout.readline())
        if any(answer["codes"]):
            errors = "\n".join(f"rank {r}:\n{(folder / f'err.{r}').read_text()[-3000:]}" for r in range(world))
            why = f"ran past {timeout} s" if answer["timed_out"] else f"exit codes {answer['codes']}"
            pytest.fail(f"{program} {' '.join(request['arguments'])} on {world} ranks: {why}\n{errors}")
        lines = (folder / "out.0").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("FOUND ")).removeprefix("FOUND "))

    return start
