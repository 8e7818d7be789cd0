"""What every test gets: one thread, fixed seeds, no network, and a way to run commands that leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", PYTHONUNBUFFERED="1")

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Each test starts from the same random state, on one thread, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def run_command(
    command: list[Any], timeout: float = 120, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `command`; it and all it started are killed after `timeout` seconds or when the caller is interrupted.

    Returns the finished process with text `stdout` and `stderr`, whatever its exit code. Fails the test on a timeout.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **with_source_path(env or {})},
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        out, err = process.communicate()
        shown = " ".join(map(str, command))
        pytest.fail(f"{shown} ran past {timeout} s\nstdout:\n{out[-4000:]}\nstderr:\n{err[-4000:]}")
    except BaseException:
        kill_tree(process.pid)
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants; torchrun's ranks are in process groups of their own."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()  # state, parent, ...
            parents.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    doomed = [pid]
    for parent in doomed:
        doomed += parents.get(parent, [])
    for victim in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def with_source_path(env: Mapping[str, str]) -> dict[str, str]:
    """`env` in which a child process imports this checkout, from whatever folder it starts."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(command, timeout=120, env=None, cwd=None)`: see `run_command`."""
    return run_command


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`torchrun(processes, *program, timeout=120, env=None, cwd=None)`: a script, or "-m" and a module; then flags."""

    def start(processes: int, *program: Any, timeout: float = 120, **more: Any) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return run_command([*launcher, *program], timeout, **more)

    return start
