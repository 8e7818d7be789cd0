"""The helper that runs commands leaves nothing running, also what the command moved into another process group."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = (
    "import subprocess, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True)"
)


def test_timeout_kills_descendants_in_other_groups(run: Callable, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(f"{CODE}\nopen('pid', 'w').write(str(p.pid))\ntime.sleep(60)\n")
    with pytest.raises(pytest.fail.Exception, match="ran past 3 s"):
        run([sys.executable, script], timeout=3, cwd=tmp_path)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "sleep" in (Path(f"/proc/{pid}/cmdline").read_text() or ""):
        assert time.monotonic() < end, f"{pid} still runs"
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(pid, 0)  # a zombie until init takes it
            time.sleep(0.1)
