"""The launch scripts on a real SLURM with two nodes, training with the experts split between them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
MODEL = {
    "hidden_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "seq_len": 32,
    "vocab_size": 4096,
    "post_embed_norm": False,
    "weight_tying": False,
}


@dataclass
class Job:
    """A submitted job, and what it left in its run folder."""

    id: str
    run: Path
    printed: Path

    @property
    def output(self) -> str:
        return self.printed.read_text() if self.printed.exists() else ""

    def steps(self) -> list[int]:
        """The steps that have been logged, in order."""
        file = self.run / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [record["step"] for record in records if "train/loss" in record]

    def wait_for_step(self, step: int, timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not any(s >= step for s in self.steps()):
            ended = "failed first" in self.output
            assert time.monotonic() < end and not ended, f"step {step} was not reached:\n{self.output[-6000:]}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the jobs are submitted from, which is not the repository."""
    folder = tmp_path_factory.mktemp("somewhere else")
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture(scope="module")
def submit(cluster: Any, folder: Path) -> Callable[..., Job]:
    """`submit(name, *flags, steps=STEPS)` through launch/submit.py, with paths relative to `folder`."""

    def start(name: str, *flags: object, steps: int = STEPS) -> Job:
        own = ["--nodes", 2, "--gpus-per-node", 0, "--time", "20:00", "--job-name", name]
        trainer = ["--model", "tiny.json", "--experts", 4, "--fsdp", "--expert-parallel", 2, "--global-batch-size", 4]
        trainer += ["--train-num-samples", 4 * MODEL["seq_len"] * steps, "--log-every-n-steps", 1]
        trainer += ["--logs", "my logs", "--name", name, *flags]
        said = cluster.command(sys.executable, ROOT / "launch" / "submit.py", *own, "--", *trainer, cwd=folder)
        job = re.search(r"submitted job (\d+)", said)[1]
        return Job(job, folder / "my logs" / name, folder / "my logs" / "slurm" / f"{name}-{job}.out")

    return start


@pytest.fixture(scope="module")
def unbroken(cluster: Any, submit: Callable[..., Job]) -> Job:
    """A job that ran to its end without any event."""
    job = submit("unbroken")
    cluster.wait_for(job.id, "COMPLETED", "FAILED", timeout=300)
    return job


def final_state(job: Job, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights and optimizer state, by name."""
    dcp_to_torch_save(job.run / "checkpoints" / f"step_{STEPS:07d}", tmp_path / "state.pt")
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                collect(f"{prefix}/{key}", part)

    collect("", torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(found) > 20
    return found


def assert_same_end(job: Job, unbroken: Job, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours, theirs = final_state(job, tmp_path / "a"), final_state(unbroken, tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_two_nodes_train_to_the_end(cluster: Any, unbroken: Job) -> None:
    assert cluster.field(unbroken.id, "JobState") == "COMPLETED", unbroken.output
    assert cluster.field(unbroken.id, "Restarts") == "0"
    assert unbroken.steps() == list(range(1, STEPS + 1))
    settings = json.loads((unbroken.run / "params.json").read_text())
    assert (settings["world_size"], settings["expert_parallel_size"]) == (2, 2)
    assert re.search(r"on n1 n2, meeting at (?!127\.)[0-9.]+:\d+", unbroken.output)
    rank_logs = unbroken.run / "output" / "start_0"
    assert {p.name for p in rank_logs.iterdir()} == {"rank_0.log", "rank_1.log"}
    assert f"step {STEPS} |" in unbroken.output
    assert f"step {STEPS} |" in (rank_logs / "rank_0.log").read_text()
    written = unbroken.printed.with_suffix(".sbatch").read_text()
    assert "#SBATCH --signal=B:USR1@120\n" in written


def test_signal_saves_requeues_and_resumes_to_the_same_weights(
    cluster: Any, submit: Callable[..., Job], unbroken: Job, tmp_path: Path
) -> None:
    job = submit("preempted")
    job.wait_for_step(10)
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    assert cluster.wait_for(job.id, "COMPLETED", "FAILED", timeout=300) == "COMPLETED", job.output
    assert cluster.field(job.id, "Restarts") == "1"
    assert re.search(r"stopped as asked after step \d+ of 60", job.output)
    assert job.steps() == list(range(1, STEPS + 1))  # none twice, none left out
    assert not (job.run / "stop").exists()
    assert_same_end(job, unbroken, tmp_path)


def test_node_that_dies_brings_the_job_back(
    cluster: Any, submit: Callable[..., Job], unbroken: Job, tmp_path: Path
) -> None:
    job = submit("node", "--save-every-n-steps", 10)
    job.wait_for_step(12)
    cluster.kill_node("n2")
    cluster.wait_for(job.id, "PENDING", timeout=180)
    assert "node n2 does not answer" in job.output
    cluster.start_node("n2")
    assert cluster.wait_for(job.id, "COMPLETED", "FAILED", timeout=300) == "COMPLETED", job.output
    assert_same_end(job, unbroken, tmp_path)


def test_rank_that_fails_is_named_and_ends_the_job(cluster: Any, submit: Callable[..., Job]) -> None:
    job = submit("crash", steps=4000)
    job.wait_for_step(5)
    cluster.kill_rank(job.id, 1)
    assert cluster.wait_for(job.id, "FAILED", "COMPLETED", timeout=180) == "FAILED"
    assert cluster.field(job.id, "Restarts") == "0"
    end = job.output[job.output.index("failed first") :]
    assert re.search(r"rank 1 on n[12] failed first, with exit code 137; the end of .*rank_1\.log", job.output), end


def test_users_mistake_fails_without_a_second_try(cluster: Any, submit: Callable[..., Job]) -> None:
    job = submit("mistake", "--dataset-manifest", "nowhere/manifest.jsonl")  # only the job can see that it is missing
    assert cluster.wait_for(job.id, "FAILED", "COMPLETED", timeout=180) == "FAILED"
    assert job.output.count("openlm_moe.main: error: manifest nowhere/manifest.jsonl does not exist") >= 1
    assert "requeueing" not in job.output
    assert cluster.field(job.id, "Restarts") == "0"


def test_cancelled_job_saves_and_stays_away(cluster: Any, submit: Callable[..., Job]) -> None:
    job = submit("cancelled", steps=4000)
    job.wait_for_step(5)
    cluster.command("scancel", job.id)
    assert cluster.wait_for(job.id, "CANCELLED") == "CANCELLED"
    end = time.monotonic() + 60
    while cluster.command("squeue", "--noheader", "--jobs", job.id):
        assert time.monotonic() < end
        time.sleep(0.5)
    assert cluster.field(job.id, "JobState") == "CANCELLED"
    assert "requeueing" not in job.output
    assert list((job.run / "checkpoints").glob("step_*"))
