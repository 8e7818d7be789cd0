"""`python -m openlm_moe.data.prepare`: text, JSON lines or parquet to shards and a manifest, as open_lm reads them.

    python -m openlm_moe.data.prepare corpus/*.jsonl.zst --tokenizer tokenizer.json --output shards --seq-len 2048

On a cluster every task of a job array adds `--task-index i --num-tasks n`, and a last step runs `--merge`: the result
is the same as one process makes. An interrupted run continues where it was when it is started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from openlm_moe.data.cache import locked, write_atomically
from openlm_moe.data.corpus import embedded_tokenizer
from openlm_moe.data.documents import find_inputs
from openlm_moe.data.groups import Recipe, read_part, write_group
from openlm_moe.data.manifest import write_manifest
from openlm_moe.data.tokenizer import load_encoder
from openlm_moe.errors import UserError
from openlm_moe.options import Parser

log = logging.getLogger(__name__)


def prepare(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str,
    seq_len: int = 2048,
    shard_size: int = 8192,
    seed: int = 0,
    format: str = "auto",
    text_key: str = "text",
    end_token: str | None = None,
    group_bytes: int = 256 * 2**20,
    workers: int = 1,
    task_index: int = 0,
    num_tasks: int = 1,
) -> None:
    """Writes the shards of this task's groups; as the only task, also the manifest.

    `tokenizer` is a file, or "embedded" for the embedded corpus's. Documents are joined with the end token between
    them and cut into samples of seq_len + 1 tokens; at the end of each group of about `group_bytes` of input, the
    tokens after the last whole sample are left out. Raises `UserError`.
    """
    if not 0 <= task_index < num_tasks:
        raise UserError(f"--task-index {task_index} is not below --num-tasks {num_tasks}")
    if min(seq_len, shard_size, group_bytes, workers) < 1:
        raise UserError("--seq-len, --shard-size, --group-bytes and --workers must be at least 1")
    tokenizer = embedded_tokenizer() if tokenizer == "embedded" else tokenizer
    encoder = load_encoder(tokenizer, end_token)
    recipe = Recipe(
        tuple(find_inputs(inputs, format)),
        encoder.digest,
        encoder.end_id,
        seq_len,
        shard_size,
        seed,
        format,
        text_key,
        group_bytes,
    )
    target = Path(output)
    _claim(target, recipe)
    groups = list(enumerate(recipe.groups()))[task_index::num_tasks]
    waiting = [(number, files) for number, files in groups if read_part(target, number) is None]
    log.info(
        "task %d of %d: %d groups, %d of them done before",
        task_index,
        num_tasks,
        len(groups),
        len(groups) - len(waiting),
    )
    jobs = [(target, recipe, number, files, tokenizer, end_token) for number, files in waiting]
    if workers == 1:
        for job in jobs:
            write_group(*job)
    else:
        _in_processes(jobs, workers)
    if num_tasks == 1:
        merge(target)


def merge(output: str | os.PathLike[str]) -> None:
    """Checks that every group is done and every shard is what its part file says, then writes manifest.jsonl.

    Raises `UserError` naming what is missing or damaged.
    """
    target = Path(output)
    try:
        recipe = json.loads((target / ".prepare" / "recipe.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"{target} holds nothing to merge; run prepare with --output {target} first") from error
    parts = [read_part(target, group) for group in range(recipe["num_groups"])]
    missing = [group for group, part in enumerate(parts) if part is None]
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        raise UserError(
            f"{len(missing)} of {len(parts)} groups are not done (group {listed}; group g belongs to task g modulo "
            "--num-tasks); run their tasks again, then --merge"
        )
    shards = [shard for part in parts if part is not None for shard in part["shards"]]
    for shard in shards:
        path = target / f"{shard['shard']}.tar"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                raise UserError(f"shard {path} was changed or damaged; delete it, run its task again, then --merge")
    totals = {key: sum(part[key] for part in parts if part is not None) for key in ("documents", "tokens")}
    if not shards:
        raise UserError(f"the input has {totals['tokens']} tokens, too few for a sample of {recipe['seq_len'] + 1}")
    totals |= {"samples": sum(shard["num_sequences"] for shard in shards), "shards": len(shards)}
    write_atomically(target / "prepare.json", (json.dumps({**recipe, **totals}, indent=1) + "\n").encode())
    write_manifest(target / "manifest.jsonl", [(shard["shard"], shard["num_sequences"]) for shard in shards])
    log.info("%s: %s", target / "manifest.jsonl", ", ".join(f"{number} {what}" for what, number in totals.items()))


def _claim(target: Path, recipe: Recipe) -> None:
    """Records the recipe in the output folder, or finds the same one there."""
    record = {**recipe.to_dict(), "num_groups": len(recipe.groups())}
    path = target / ".prepare" / "recipe.json"
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not (target / ".prepare").exists() and any(target.glob("*.tar")):
            raise UserError(f"{target} holds shards that were not made here; choose another --output")
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, (json.dumps(record) + "\n").encode())
            found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--output {target} cannot be written: {error.strerror}") from error
    changed = next((key for key in record if found.get(key) != record[key]), None)
    if changed is not None:
        values = "" if changed == "inputs" else f" ({found.get(changed)}, now {record[changed]})"
        raise UserError(
            f"{target} was begun with another {changed}{values}; choose another --output, or delete it to start over"
        )


def _in_processes(jobs: Sequence[tuple[Any, ...]], workers: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(write_group, *job) for job in jobs]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m openlm_moe.data.prepare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "inputs", nargs="*", metavar="INPUT", help="files, folders or patterns, local or s3://, gs://, ..."
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for shards and manifest.jsonl")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, or `embedded` for the default corpus's")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens the model sees; samples have one more")
    parser.add_argument("--shard-size", type=int, default=8192, help="samples per shard, at most")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of files and samples")
    parser.add_argument("--format", choices=("auto", "text", "jsonl", "parquet"), default="auto", help="input format")
    parser.add_argument("--text-key", default="text", help="JSON key or parquet column of the text")
    parser.add_argument("--end-token", help="token that ends each document; default: the tokenizer's known one")
    parser.add_argument("--group-bytes", type=int, default=256 * 2**20, help="input per unit of work")
    parser.add_argument("--workers", type=int, default=1, help="processes on this machine")
    parser.add_argument("--task-index", type=int, default=0, help="this task of a job array, from 0")
    parser.add_argument("--num-tasks", type=int, default=1, help="tasks in the job array")
    parser.add_argument("--merge", action="store_true", help="check what all tasks wrote, and write the manifest")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 after a user's mistake, told in one line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = vars(_parser().parse_args(argv))
    try:
        if arguments.pop("merge"):
            merge(arguments["output"])
            return 0
        if not arguments["inputs"] or arguments["tokenizer"] is None:
            raise UserError("prepare needs INPUT files and --tokenizer FILE (or --tokenizer embedded)")
        prepare(**arguments)
    except UserError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
