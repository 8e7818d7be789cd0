"""`python -m openlm_moe.evaluate_tasks --model-dir DIR --tasks mmlu,...`: a model on tasks of the lm-eval harness.

DIR is a Hugging Face folder, a run's folder or a checkpoint of one; the latter two are loaded in the built-in model.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.options import DTYPES, Parser

EXTRA = ("lm_eval", "accelerate", "transformers", "datasets")  # what the extra `eval` brings


def build_parser() -> Parser:
    parser = Parser(prog="python -m openlm_moe.evaluate_tasks", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model-dir", type=Path, required=True, help="Hugging Face folder, run folder or checkpoint")
    add("--tasks", required=True, help="names of the harness's tasks and groups, or YAML files, separated by commas")
    add("--include-path", type=Path, help="folder with more tasks (YAML files)")
    add("--tokenizer", type=Path, help="tokenizer.json or its folder; default: the model's own")
    add("--num-fewshot", type=int, help="examples in the context; default: the task's own number")
    add("--limit", type=int, help="questions of each task; default: all")
    add("--batch-size", type=int, default=8, help="questions at once (default 8)")
    add("--dtype", choices=("fp32", "bf16"), help="arithmetic; default: bf16 on a GPU, fp32 on a CPU")
    add("--output", type=Path, help="JSON file for the results, every question's answers included")
    add("--trust-remote-code", action="store_true", help="run the Python files of a Hugging Face folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates and prints the harness's table; returns the exit code: 2 after a user's mistake, told in one line."""
    arguments = build_parser().parse_args(argv)
    try:
        results = evaluate_tasks(arguments)
    except UserError as error:
        print(f"evaluate_tasks: error: {error}", file=sys.stderr)
        return 2
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(f"wrote {arguments.output}")
    return 0


def evaluate_tasks(arguments: argparse.Namespace) -> dict[str, Any]:
    """The harness's results, with `samples` by task: each question, its answers' log-likelihoods and its scores."""
    missing = [package for package in EXTRA if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f'{missing[0]} is not installed: pip install "openlm-moe[eval]"')
    for name in ("batch_size", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be 1 or more")
    if not arguments.model_dir.is_dir():
        raise UserError(f"--model-dir {arguments.model_dir} is no folder")
    tasks, manager = find_tasks(arguments.tasks, arguments.include_path)
    import torch
    from lm_eval import simple_evaluate

    from openlm_moe.interop.lm_eval import make_lm

    lm = make_lm(
        arguments.model_dir,
        tokenizer=arguments.tokenizer,
        batch_size=arguments.batch_size,
        dtype=DTYPES[arguments.dtype or ("bf16" if torch.cuda.is_available() else "fp32")],
        trust_remote_code=arguments.trust_remote_code,
    )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        return simple_evaluate(
            model=lm,
            tasks=tasks,
            num_fewshot=arguments.num_fewshot,
            batch_size=arguments.batch_size,
            limit=arguments.limit,
            task_manager=manager,
        )
    except OSError as error:  # a data set that is not there, or no network to fetch it
        raise UserError(f"the data of --tasks {arguments.tasks} cannot be read: {str(error).splitlines()[0]}") from None


def find_tasks(names: str, include_path: Path | None) -> tuple[list[str], Any]:
    """The task names in a comma-separated list, and the harness's manager that knows them. Raises `UserError`."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path} is no folder")
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    included = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=included, include_defaults=False) if included else None
    if manager is None or not set(wanted) <= set(manager.all_tasks):  # reading the harness's own takes seconds
        manager = TaskManager(include_path=included)
    for name in wanted:
        if name not in manager.all_tasks and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            raise UserError(f"--tasks names {name!r}, which the harness does not know; {hint}")
    if not wanted:
        raise UserError("--tasks names no task")
    return wanted, manager


if __name__ == "__main__":
    sys.exit(main())
