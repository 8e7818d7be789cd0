"""submit.py: what it writes, refuses, and says. The written jobs are compared with golden files.

After a wanted change of slurm.sbatch or submit.py: `UPDATE_GOLDEN=1 python -m pytest tests/launch/test_submit.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
FITS = "--model open_lm_41m --moe-every 2 --experts 8 --train-data shards/{0..7}.tar --global-batch-size 256".split()
TOO_BIG = "--model open_lm_830m --experts 32 --train-data x.tar --global-batch-size 256".split()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """launch/submit.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("launch_submit", ROOT / "launch" / "submit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def submit(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs submit.py with these words in `tmp_path`, where a folder `bin` comes first on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(shutil.which('bash')).parent}")

    def start(*words: str) -> Done:
        try:
            code = module.main(words)
        except SystemExit as error:
            code = error.code
        return Done(code, *capsys.readouterr())

    return start


def stub(folder: Path, name: str, body: str) -> None:
    """An executable `name` in `folder` that runs `body`."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


CASES = {
    "one_node": [["--gpu", "A100-80", "--bin", "/env/bin"], FITS],
    "four_nodes": [
        "--nodes 4 --gpus-per-node h100:8 --time 02:00:00 --partition gpu --account lab --cpus-per-gpu 12 "
        "--sbatch=--exclusive --save-before 300 --bin /env/bin".split(),
        [*FITS, "--name", "forty one", "--output", "/shared/logs", "--fsdp"],
    ],
    "two_cpu_nodes": [
        ["--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "4", "--bin", "/env/bin"],
        ["--experts", "8", "--resume", "latest"],
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_dry_run_prints_the_golden_job(case: str, submit: Callable[..., Done], tmp_path: Path) -> None:
    own, flags = CASES[case]
    done = submit("--dry-run", *own, "--", *flags)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(str(tmp_path), "/here").replace(str(ROOT), "/repo")
    golden = GOLDEN / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert not list(tmp_path.iterdir())


def test_written_job_is_what_bash_and_slurm_need(submit: Callable[..., Done], tmp_path: Path) -> None:
    done = submit("--dry-run", "--nodes", "4", "--gpu", "H100", "--", *FITS, "--name", "it's $HOME")
    (tmp_path / "job").write_text(done.stdout)
    assert subprocess.run(["bash", "-n", tmp_path / "job"]).returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives == list(range(1, len(directives) + 1))  # sbatch stops reading at the first command
    assert "#SBATCH --ntasks-per-node=1" in lines
    settings = lines[len(directives) + 1 : lines.index("set -uo pipefail")]
    show = "\n".join([*settings, 'printf "%s\\n" "$RUN_NAME" "$@"'])
    printed = subprocess.run(["bash", "-c", show], capture_output=True, text=True).stdout
    assert printed.splitlines() == ["it's $HOME", *FITS]


def test_submits_from_any_folder_and_keeps_the_job(submit: Callable[..., Done], tmp_path: Path) -> None:
    stub(tmp_path / "bin", "sbatch", 'cp "${@: -1}" "$PWD/seen"; echo "77;cluster"')
    done = submit("--gpu", "H100", "--job-name", "first", "--", *FITS)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "logs" / "slurm" / "first-77.sbatch"
    assert kept.read_text() == (tmp_path / "seen").read_text()
    assert f"LAUNCH_DIR={ROOT / 'launch'}\n" in kept.read_text()
    assert done.stdout == (
        f"submitted job 77; its output: {tmp_path}/logs/slurm/first-77.out\nrun folder: {tmp_path}/logs/first-77\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H100", "--", *TOO_BIG], "it fits with --fsdp --fsdp-amp --expert-parallel 8 --accum-freq 4 ("),
        (["--gpus-per-node", "h100:8", "--", *TOO_BIG], "GiB on a H100"),
        (["--gpu", "X100", "--", *FITS], "unknown GPU 'X100'; known are"),
        (["--", *FITS, "--expertss", "8"], "unknown argument --expertss; did you mean --experts?"),
        (["--nodess", "2", "--", *FITS], "unknown argument --nodess; did you mean --nodes?"),
        (["--", *FITS, "--resume", "old/run"], "use --pretrained for weights"),
        (["--", *FITS, "--top-k", "9"], "top"),
    ],
)
def test_refuses_before_anything_is_submitted(
    words: list[str], message: str, submit: Callable[..., Done], tmp_path: Path
) -> None:
    stub(tmp_path / "bin", "sbatch", "touch $PWD/submitted; echo 1")
    done = submit(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"bin"}


def test_force_submits_what_does_not_fit(submit: Callable[..., Done], tmp_path: Path) -> None:
    done = submit("--dry-run", "--force", "--gpu", "H100", "--", *TOO_BIG)
    assert done.returncode == 0
    assert done.stdout.startswith("#!")


def test_unknown_gpus_are_said_not_to_be_checked(submit: Callable[..., Done], tmp_path: Path) -> None:
    done = submit("--dry-run", "--gpus-per-node", "gtx:8", "--", *TOO_BIG)
    assert done.returncode == 0
    assert done.stderr == "memory was not checked: name the GPUs with --gpu\n"


def test_without_sbatch_and_when_sbatch_refuses(
    submit: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--gpus-per-node", "0", "--", "--experts", "8"]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    done = submit(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("submit.py: error: sbatch is not on PATH: submit ")
    stub(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    done = submit(*words)
    assert done.returncode == 2
    assert "invalid partition" in done.stderr
