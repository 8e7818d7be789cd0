"""A SLURM of two nodes on this machine: munged, slurmctld and two slurmd on free ports, all in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=15
KillWait=20
MinJobAge=600
SchedulerParameters=sched_interval=2,bf_interval=2
FirstJobId={first_job}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """A running SLURM; `env` is what its commands need."""

    folder: Path
    env: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def command(self, *words: object, timeout: float = 30, cwd: Path | None = None) -> str:
        """Runs a SLURM command; its stdout. Raises for a failure."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            [str(w) for w in words], env=env, text=True, capture_output=True, timeout=timeout, cwd=cwd
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, name: str, *command: object) -> None:
        """Starts a daemon in the foreground, with its output kept in the folder."""
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                [str(c) for c in command],
                stdout=out,
                stderr=out,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """What a node's power failure looks like: its slurmd, its step daemons and its processes are gone at once."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for process in _processes():
            environment = _read(process / "environ")
            if f"SLURM_CONF={self.env['SLURM_CONF']}" not in environment:
                continue
            if f"SLURMD_NODENAME={node}" in environment or f"[{node}" in _read(process / "cmdline"):
                _kill(int(process.name))

    def kill_rank(self, job: str, rank: int) -> None:
        """kill -9 of one rank's trainer."""
        for process in _processes():
            its = {*_read(process / "environ").splitlines(), *_read(process / "cmdline").splitlines()}
            if {f"SLURM_JOB_ID={job}", f"RANK={rank}", "openlm_moe.main"} <= its:
                _kill(int(process.name))

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        words = dict(w.split("=", 1) for w in self.command("scontrol", "show", "job", "-o", job).split() if "=" in w)
        return words[name]

    def wait_for(self, job: str, *states: str, timeout: float = 120) -> str:
        """Waits until the job is in one of `states`."""
        end = time.monotonic() + timeout
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < end, f"job {job} is {state} ({self.field(job, 'Reason')}), not {states}"
            time.sleep(0.3)
        return state

    def stop(self) -> None:
        subprocess.run(["scancel", "--user=root"], env={**os.environ, **self.env}, timeout=30, capture_output=True)
        time.sleep(1)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for process in _processes():  # what a killed node left behind
            if f"SLURM_CONF={self.env['SLURM_CONF']}" in _read(process / "environ"):
                _kill(int(process.name))


def _processes() -> list[Path]:
    return [p for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b"\n").decode(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A fresh two-node SLURM, stopped after the module's tests."""
    missing = [d for d in DAEMONS if shutil.which(d) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(f"needs root and SLURM (Debian: slurm-wlm munge); missing: {', '.join(missing) or 'root'}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    ports = dict(zip(("ctld_port", "port_1", "port_2"), free_ports(3), strict=True))
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=socket.gethostname(), first_job=random.randint(1000, 50000), **ports)
    )
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    sources = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cluster = Cluster(folder, {"SLURM_CONF": str(config), "PYTHONPATH": sources, "PATH": path})
    try:
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        cluster.start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        cluster.start("slurmctld", "slurmctld", "-D")
        cluster.start_node("n1")
        cluster.start_node("n2")
        wait_until_idle(cluster)
        yield cluster
    finally:
        cluster.stop()


def wait_until_idle(cluster: Cluster, timeout: float = 60) -> None:
    """Waits until both nodes take jobs."""
    end = time.monotonic() + timeout
    while True:
        try:
            states = cluster.command("sinfo", "--noheader", "--Node", "--format=%T").split()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            states = [str(error)]
        if states == ["idle", "idle"]:
            return
        assert time.monotonic() < end, f"{states}\n{(cluster.folder / 'slurmctld.out').read_text()[-2000:]}"
        time.sleep(0.3)
