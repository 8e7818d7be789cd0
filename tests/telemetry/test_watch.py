"""watch: what it reads, what it shows, and that it follows a run on a real terminal."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from openlm_moe.telemetry import Sinks, expert_loads
from openlm_moe.telemetry.watch import bars, curve, load_style, main, read_state, render


def log(sinks: Sinks, step: int, **values: float) -> None:
    record = {"train/loss": 8.0 / step, "train/samples_per_second": 200.0, **values}
    with contextlib.redirect_stdout(io.StringIO()):
        sinks.log(record | expert_loads({2: [1, 1, 1, 5]}), step=step, tokens=100 * step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with contextlib.redirect_stdout(io.StringIO()), Sinks(tmp_path, total_tokens=1000, name="first") as sinks:
        sinks.config({})
        for step in (1, 2, 4):
            log(sinks, step)
        sinks.log({"valid/stdlib/perplexity": 90.5}, step=4, tokens=400)
    return tmp_path


def shown(folder: Path, width: int = 90) -> str:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width)
    console.print(render(read_state(folder)))
    return console.file.getvalue()


def test_state(folder: Path) -> None:
    state = read_state(folder)
    assert (state.name, state.step, state.tokens, state.total_tokens) == ("first", 4, 400, 1000)
    assert state.losses == [8.0, 4.0, 2.0]
    assert state.valid == {"stdlib": 90.5}
    assert state.loads == {2: [0.125, 0.125, 0.125, 0.625]}
    assert state.eta == 3.0  # 600 tokens at 200 a second
    assert 0 <= state.age < 60


def test_shows_the_facts(folder: Path) -> None:
    text = shown(folder)
    for line in ("first", "400 of 1k (40.0%)", "loss                2.0000", " █▃▁ ", "90.50", "200", "0:03"):
        assert line in text, f"{line!r} is not in\n{text}"
    row = next(line for line in text.splitlines() if "2.50" in line)
    assert row.split()[1:5] == ["2", "2.50", "0.50", "▃▃▃█"]


def test_fits_a_narrow_terminal(folder: Path) -> None:
    assert max(map(len, shown(folder, width=50).splitlines())) <= 50


def test_a_run_that_has_logged_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    state = read_state(tmp_path)
    assert (state.step, state.loss, state.eta, state.loads) == (0, None, None, {})
    assert tmp_path.name in shown(tmp_path)


def test_bars_and_curves() -> None:
    assert bars([0, 1, 2, 9], 0, 2) == "▁▅██"
    assert bars([3, 3], 3, 3) == "▁▁"
    assert curve([1.0, float("nan"), 3.0]) == "▁█"
    assert curve([0.0] * 500 + [1.0] * 500, width=4) == "▁▁██"
    assert curve([]) == ""


@pytest.mark.parametrize(("load", "style"), [(2.5, "red"), (1.6, "yellow"), (1.0, "green"), (0.3, "blue")])
def test_load_style(load: float, style: str) -> None:
    assert load_style(load) == style


def test_command_without_a_terminal_prints_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main([str(folder)]) == 0
    assert "40.0%" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert "has no metrics.jsonl" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "rich.panel", None)
    assert main([str(folder)]) == 2
    assert 'pip install "openlm-moe[watch]"' in capsys.readouterr().err


def test_follows_a_run_on_a_terminal(folder: Path, repo_root: Path) -> None:
    pytest.importorskip("rich")
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "openlm_moe.telemetry.watch", str(folder), "--interval", "0.1"]
    paths = f"{repo_root}{os.pathsep}{repo_root / 'kernels'}"
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "40", "PYTHONPATH": paths}
    # A shell that starts the tests in the background has them ignore Ctrl-C, and they would pass that on.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, preexec_fn=heed)
    os.close(theirs)
    try:
        wait_for(ours, "400 of 1k")
        with contextlib.redirect_stdout(io.StringIO()), Sinks(folder, resume_step=4) as sinks:
            log(sinks, 5)
        wait_for(ours, "500")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def wait_for(terminal: int, text: str, seconds: float = 60) -> None:
    """Reads the terminal until `text` has come."""
    seen, deadline = "", time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{seen[-2000:]}"
        seen += os.read(terminal, 65536).decode(errors="replace")
