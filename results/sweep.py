"""Trains what the queue (sweep_queue.json) asks for and sweep.jsonl has no record of, one run after the other.

    OMP_NUM_THREADS=1 python -m results.sweep

Started several times at once, the processes share the queue. A run that is interrupted goes on from its checkpoint
the next time; checkpoints lie in the cache folder and are removed when a run is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openlm_moe.data.cache import cache_root
from openlm_moe.data.corpus import embedded_corpus
from openlm_moe.hosts.builtin.args import parse_args
from openlm_moe.hosts.builtin.count import count_parameters, flops_per_token
from openlm_moe.hosts.builtin.params import load_model
from openlm_moe.main import main as train
from openlm_moe.parallel.checkpoint import complete_checkpoints
from openlm_moe.telemetry import metrics
from results import records
from results.linux_corpus import linux_corpus
from results.sweep_queue import (
    QUEUE_FILE,
    RECORDS_FILE,
    Run,
    as_record,
    finished,
    flags,
    model_values,
    read_queue,
    stage_runs,
)

SAVE_EVERY = 400  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS_FILE, help="file that records are added to")
    parser.add_argument("--work", type=Path, default=cache_root() / "sweep", help="folder for runs under way")
    parser.add_argument("--most", type=int, help="end after so many runs")
    options = parser.parse_args()
    count = 0
    while options.most is None or count < options.most:
        with next_run(options.records, options.work) as run:
            if run is None:
                break
            record = train_run(run, read_queue(), options.work)
            if record is None:
                break
            records.append(options.records, record)
            print(f"{run.name}: {record['valid_loss']}, {record['seconds']:.0f} s", flush=True)
            shutil.rmtree(options.work / run.name, ignore_errors=True)
        count += 1


@contextlib.contextmanager
def next_run(records_file: Path, work: Path) -> Iterator[Run | None]:
    """The first run of the queue that has no record and that no other process holds; None if there is none.

    Runs whose learning rate other processes are still tuning are waited for only when nothing else is left.
    """
    work.mkdir(parents=True, exist_ok=True)
    while True:
        queue, done = read_queue(), finished(records.read(records_file))
        held = False
        for stage in queue["stages"]:
            for run in stage_runs(stage, queue, done):
                if run in done:
                    continue
                with (work / f"{run.name}.lock").open("w") as lock:
                    if not _lock(lock):
                        held = True
                    elif run not in finished(records.read(records_file)):
                        yield run
                        return
        if not held:
            yield None
            return
        time.sleep(5)


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def train_run(run: Run, queue: dict[str, Any], work: Path) -> dict[str, Any] | None:
    """Trains `run`, from its checkpoint if it has one, and returns its record; a diverged run has no loss.

    None if it was told to stop (SIGTERM, Ctrl-C) and left a checkpoint to go on from.
    """
    size = queue["sizes"][run.size]
    train_data, valid_data, corpus = open_corpus(size["corpus"], size["seq_len"])
    if run.tokens > 4 * corpus["train_tokens"]:
        raise SystemExit(f"{QUEUE_FILE}: {run.name} passes more than 4 times over {corpus['train_tokens']} tokens")
    folder = work / run.name
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.json"
    model.write_text(json.dumps(model_values(size)))
    what = {"--model": model, "--dataset-manifest": train_data, "--val-data": valid_data, **flags(run, queue)}
    argv = words(
        {
            **what,
            "--multiple-data-passes": True,
            "--logs": folder,
            "--name": "run",
            "--save-every-n-steps": SAVE_EVERY,
            "--keep-last": 1,
            **start(run, queue, work),
        }
    )
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = train(argv)
    sys.stderr.write(told.getvalue())
    diverged = code == 1 and "is not finite" in told.getvalue()
    if code != 0 and not diverged:
        raise SystemExit(code)
    rows = records.read(folder / "run" / "metrics.jsonl")
    if code == 0 and not valid_losses(rows):
        return None
    return {
        **as_record(run),
        **(outcome(rows) if code == 0 else {"valid_loss": None}),
        **counts(argv),
        "seconds": round(seconds(rows), 1),
        "corpus": corpus,
        "model": model_values(size),
        "flags": flags(run, queue),
        **records.origin(),
    }


def words(chosen: dict[str, Any]) -> list[str]:
    """Flags as a command line; True is a bare flag."""
    out = []
    for flag, value in chosen.items():
        out += [flag] if value is True else [flag, str(value)]
    return out


def start(run: Run, queue: dict[str, Any], work: Path) -> dict[str, Any]:
    """Where the run begins: its own last checkpoint, or the dense model that it grows from, or nothing."""
    source = queue["arms"][run.arm].get("upcycled_from")
    if source is None or complete_checkpoints(work / run.name / "run" / "checkpoints"):
        return {"--resume": "latest"}
    from results.upcycling import upcycled

    dense = Run(run.size, source, run.lr, run.seed, run.tokens)
    return {"--pretrained": upcycled(dense, queue, work, train_run)}


def open_corpus(name: str, seq_len: int) -> tuple[str, str, dict[str, Any]]:
    """(training manifest, validation manifest, what the corpus is)."""
    if name == "linux":
        return linux_corpus(seq_len)
    corpus = embedded_corpus(seq_len)
    return corpus.train, corpus.validation, {"name": name, **corpus.record}


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Validation loss, training loss over tokens, and how evenly the experts were loaded, from a run's metrics."""
    losses = [[row["tokens"], round(row["train/loss"], 4)] for row in rows if "train/loss" in row]
    loads = [row for row in rows if any(key.startswith("experts/layer_") for key in row)]
    curves = {
        key: [[row["tokens"], round(row[key], 4)] for row in loads]
        for key in (loads[-1] if loads else ())
        if key.endswith(("/max_over_mean", "/min_over_mean"))
    }
    dropped = [row["train/dropped_fraction"] for row in loads]
    return {
        "valid_loss": valid_losses(rows)[-1],
        "train_loss": losses,
        "load": curves,
        "dropped": round(sum(dropped) / len(dropped), 6) if dropped else 0.0,
    }


def valid_losses(rows: list[dict[str, Any]]) -> list[float]:
    return [v for row in rows for key, v in row.items() if key.startswith("valid/") and key.endswith("/loss")]


def seconds(rows: list[dict[str, Any]]) -> float:
    """Time in training steps, those before an interruption included; evaluation and checkpoints are not."""
    timed = [row for row in rows if metrics.BATCH_TIME in row]
    before = [0, *(row["step"] for row in timed)][:-1]
    return sum(row[metrics.BATCH_TIME] * (row["step"] - b) for row, b in zip(timed, before, strict=True))


def counts(argv: list[str]) -> dict[str, Any]:
    """Parameters and active FLOPs of the run's model."""
    args = parse_args(argv)
    params, moe = load_model(args.model, vars(args), args.moe)
    count = count_parameters(params, moe)
    return {
        "parameters": {
            "total": count.total,
            "active": count.active,
            "embedding": count.embedding + count.head,
        },
        "flops_per_token": flops_per_token(params, moe),
    }


if __name__ == "__main__":
    main()
