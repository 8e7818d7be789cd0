"""Data preparation as a SLURM job array gives byte for byte what one process gives."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from openlm_moe.data.prepare import prepare

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "prepare.sbatch"
FLAGS = ["--tokenizer", "embedded", "--seq-len", "64", "--shard-size", "16", "--group-bytes", "20000"]


def digests(folder: Path) -> dict[str, str]:
    """What a reader of the shards sees: every tar and the manifest."""
    files = [*folder.glob("*.tar"), folder / "manifest.jsonl"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_array_equals_one_process_and_is_restarted_task_by_task(cluster: Any, tmp_path: Path) -> None:
    source = Path(os.__file__).parent
    texts = [tmp_path / f"{name}.txt" for name in ("argparse", "ast", "bdb", "calendar", "cmd", "copy")]
    for text in texts:
        text.write_text((source / text.with_suffix(".py").name).read_text())
    prepare(list(map(str, texts)), tmp_path / "one", tokenizer="embedded", seq_len=64, shard_size=16, group_bytes=20000)

    def sbatch(*flags: object) -> str:
        return cluster.command("sbatch", "--parsable", "--cpus-per-task=1", *flags, cwd=tmp_path)

    array = ["--array=0-2", SCRIPT, *texts, *FLAGS, "--output", "many"]
    first = sbatch(*array)
    merge = sbatch(f"--dependency=afterok:{first}", SCRIPT, "--output", "many", "--merge")
    cluster.wait_for(first, "COMPLETED", timeout=240)
    assert cluster.wait_for(merge, "COMPLETED", "FAILED", timeout=240) == "COMPLETED", logs(tmp_path)
    expected = digests(tmp_path / "one")
    assert len(expected) > 6
    assert digests(tmp_path / "many") == expected

    # One group is lost, as after a task that was killed: the merge refuses, and the same line makes it good.
    part = sorted((tmp_path / "many" / ".prepare").glob("*1*.json"))[0]
    part.unlink()
    refused = sbatch(SCRIPT, "--output", "many", "--merge")
    assert cluster.wait_for(refused, "COMPLETED", "FAILED") == "FAILED"
    assert "1 of" in logs(tmp_path) and "groups are not done" in logs(tmp_path)
    merge = sbatch(f"--dependency=afterok:{sbatch(*array)}", SCRIPT, "--output", "many", "--merge")
    assert cluster.wait_for(merge, "COMPLETED", "FAILED", timeout=240) == "COMPLETED", logs(tmp_path)
    assert digests(tmp_path / "many") == expected


def logs(folder: Path) -> str:
    return "\n".join(file.read_text() for file in folder.glob("openlm-moe-prepare-*.out"))
