"""`ranks`: real gloo process groups, started by one process a session that has torch imported already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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


class Ranks:
    """Starts programs of this folder on process groups."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path) -> None:
        self.launcher, self.folder, self.count = launcher, folder, 0

    def __call__(
        self, world: int, program: str, *arguments: Any, timeout: float = 90, env: Any = None
    ) -> dict[str, Any]:
        """What the program found, as `toy.main` prints it. Fails the test, with stderr, if a rank fails or hangs."""
        answer, folder = self.start(world, program, *arguments, timeout=timeout, env=env)
        if any(answer["codes"]):
            errors = "\n".join(f"rank {r}:\n{(folder / f'err.{r}').read_text()[-3000:]}" for r in range(world))
            why = f"ran past {timeout} s" if answer["timed_out"] else f"exit codes {answer['codes']}"
            pytest.fail(f"{program} {' '.join(map(str, arguments))} on {world} ranks: {why}\n{errors}")
        lines = (folder / "out.0").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("FOUND ")).removeprefix("FOUND "))

    def start(
        self, world: int, program: str, *arguments: Any, timeout: float = 90, env: Any = None, kill: Any = None
    ) -> tuple[dict[str, Any], Path]:
        """The launcher's answer, and the folder with each rank's output. `kill`: (rank, seconds) for a SIGKILL."""
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        folder.mkdir()
        request = {
            "program": str(HERE / program),
            "arguments": [str(argument) for argument in arguments],
            "world": world,
            "env": env or {},
            "timeout": timeout,
            "folder": str(folder),
            "kill": kill,
        }
        self.launcher.stdin.write(json.dumps(request) + "\n")
        self.launcher.stdin.flush()
        return json.loads(self.launcher.stdout.readline()), folder


@pytest.fixture(scope="module")
def ranks(launcher: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """`ranks(world, program, *arguments, timeout=90, env=None)`: see `Ranks`."""
    return Ranks(launcher, tmp_path_factory.mktemp("ranks"))
