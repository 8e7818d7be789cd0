"""wandb in child processes of its own, and a wandb-compatible server on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


@dataclass
class Result:
    """What tests/telemetry/wandb_child.py printed (seconds), and all of its output."""

    seconds: dict[str, float]
    output: str


@pytest.fixture(scope="session")
def train(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """`train(folder, first, last, env={...})`: a process that logs steps first..last to wandb, as training does."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")

    home = tmp_path_factory.mktemp("home")

    def start(folder: Path, first: int, last: int, env: dict[str, str] | None = None, **options: Any) -> Result:
        places = {"HOME": home, "WANDB_CACHE_DIR": home, "WANDB_CONFIG_DIR": home, "NETRC": home / "netrc"}
        environment = {**OFFLINE, **{k: str(v) for k, v in places.items()}, **(env or {})}
        command = [sys.executable, HERE / "wandb_child.py", folder, first, last, json.dumps(options)]
        process = run(command, timeout=120, env=environment)
        if options.get("die"):
            assert process.returncode == 9, process.stdout + process.stderr
            return Result({}, process.stdout + process.stderr)
        assert process.returncode == 0, process.stdout + process.stderr
        (seconds,) = (line for line in process.stdout.splitlines() if line.startswith("{"))
        return Result(json.loads(seconds), process.stdout + process.stderr)

    return start


@dataclass
class Server:
    """A running wandb-compatible server."""

    url: str
    key: str

    @property
    def env(self) -> dict[str, str]:
        return {"WANDB_MODE": "online", "WANDB_BASE_URL": self.url, "WANDB_API_KEY": self.key}

    def get(self, path: str) -> Any:
        return _call(self.url + path, key=self.key)

    def values(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """(wandb step, value) of one metric of one run, in order of step."""
        rows = self.get(f"/api/v2/runs/{run_id}/metrics?key={metric}")["metrics"]
        return [(row["step"], row["value"]) for row in rows]


def _call(url: str, body: Any = None, key: str | None = None, token: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["x-wandb-api-key"] = key
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as reply:
        return json.load(reply)


def free_port() -> int:
    """A port of loopback on which nobody listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """openwandb on a free port of loopback, with an empty database."""
    if importlib.util.find_spec("openwandb") is None:
        pytest.skip("openwandb is not installed")
    port, folder = free_port(), tmp_path_factory.mktemp("openwandb")
    command = [sys.executable, "-m", "openwandb", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([*command, "--data-dir", str(folder)], stdout=log, stderr=log)
        try:
            yield _sign_in(f"http://127.0.0.1:{port}", process, folder / "server.log")
        finally:
            process.terminate()
            process.wait(timeout=20)


def _sign_in(url: str, process: subprocess.Popen[bytes], log: Path) -> Server:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            token = _call(f"{url}/api/v2/auth/login", {"username": "admin", "password": "admin123"})["token"]
            key = _call(f"{url}/api/v2/settings/api-keys", {"name": "tests"}, token=token)["api_key"]["key"]
            return Server(url, key)
        time.sleep(0.2)
    pytest.fail(f"openwandb did not start:\n{log.read_text()[-3000:]}")
