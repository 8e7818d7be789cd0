"""node.sh without SLURM, on two hosts that reach each other over a network only: two network namespaces.

Both have the same host name, which resolves to loopback, as on many a real pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"hidden_dim": 32, "n_layers": 2, "n_heads": 2, "seq_len": 32, "vocab_size": 4096, "weight_tying": False}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.99.0.1 and 10.99.0.2, joined by a cable."""
    names = tuple(f"openlm{os.getpid()}{end}" for end in "ab")
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "v1", "netns", names[0], "type", "veth", "peer", "name", "v2", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", f"v{number}")
            for device in ("lo", f"v{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in map(int, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "delete", name)


def test_two_hosts_train_together(hosts: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({**MODEL, "post_embed_norm": False}))
    flags = ["--model", "tiny.json", "--experts", "4", "--fsdp", "--expert-parallel", "2", "--global-batch-size", "4"]
    flags += ["--train-num-samples", str(4 * 32 * 6), "--logs", "logs", "--name", "both", "--log-every-n-steps", "1"]
    env = {**os.environ, "NODES": "2", "RENDEZVOUS": "10.99.0.1:29512", "PROCESSES": "1", "RANK_LOGS": "ranks"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "TMPDIR": str(tmp_path)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # The second host starts first: it has to wait for the one that holds the meeting point.
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, ROOT / "launch" / "node.sh", *flags],
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in reversed(hosts)
    ]
    outputs = [process.communicate(timeout=150)[0] for process in running]  # the fixture ends what still runs
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    assert sum("step 6 |" in output for output in outputs) == 1  # rank 0's screen only
    settings = json.loads((tmp_path / "logs" / "both" / "params.json").read_text())
    assert (settings["world_size"], settings["expert_parallel_size"]) == (2, 2)
    assert not re.search("Error|Traceback", (tmp_path / "ranks" / "rank_1.log").read_text())
    assert not list(tmp_path.glob("openlm-moe-*"))  # the caches are gone
