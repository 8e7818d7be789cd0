"""Writes a SLURM job for the trainer and submits it.

    python launch/submit.py --nodes 4 --gpus-per-node 8 --time 24:00:00 -- --model open_lm_830m --experts 32 ...

What stands after `--` are the trainer's flags. The job is slurm.sbatch with its settings filled in; it is kept beside
the run folders, in LOGS/slurm/.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAUNCH = Path(__file__).resolve().parent
sys.path[1:1] = [str(LAUNCH.parent), str(LAUNCH.parent / "kernels")]  # a checkout that is not installed

from openlm_moe.errors import UserError  # noqa: E402
from openlm_moe.hosts.builtin.args import parse_args  # noqa: E402
from openlm_moe.options import Parser  # noqa: E402
from openlm_moe.plan import command, report  # noqa: E402
from openlm_moe.plan.gpus import GPUS  # noqa: E402

# sbatch's own names; each is passed on as it is.
PASSED_ON = ("partition", "account", "qos", "constraint", "cpus-per-task", "cpus-per-gpu", "mem", "reservation")


def build_parser() -> Parser:
    """submit.py's own flags."""
    parser = Parser(prog="submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", default="8", help="number, or type:number; 0 trains on CPUs with gloo")
    parser.add_argument("--processes-per-node", type=int, help="ranks a node; default: its GPUs, or 1 without any")
    parser.add_argument("--time", default="24:00:00", help="after this the job saves, requeues and resumes")
    parser.add_argument(
        "--save-before", type=int, default=120, metavar="SECONDS", help="of the limit that saving takes"
    )
    parser.add_argument("--job-name", default="openlm-moe")
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", help="as sbatch's")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other sbatch option")
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="folder of python and torchrun")
    parser.add_argument("--gpu", help="GPU type, for the memory check; default: the type named in --gpus-per-node")
    parser.add_argument("--force", action="store_true", help="submit although the memory check says it does not fit")
    parser.add_argument("--dry-run", action="store_true", help="print the job instead of submitting it")
    return parser


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """submit.py's arguments and, after the first `--`, the trainer's."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def take_run_flags(flags: Sequence[str]) -> tuple[Path, str | None, list[str]]:
    """The trainer's log folder (absolute), its --name, and the flags without those two, which the job sets itself.

    Raises `UserError` for a --resume that a requeued job could not keep.
    """
    parser = Parser(prog="submit.py", add_help=False)
    parser.add_argument("--logs", "--output", type=Path, default=Path("logs"))
    parser.add_argument("--name")
    parser.add_argument("--resume")
    known, rest = parser.parse_known_args(flags)
    if known.resume not in (None, "latest"):
        raise UserError(f"--resume {known.resume}: a job resumes its own latest step; use --pretrained for weights")
    return known.logs.absolute(), known.name, rest


def check_flags(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Looks at the trainer's flags now rather than when the job starts, and at the memory that they need.

    Raises `UserError` for a job that does not fit its GPUs, unless --force; unknown flags end the process with code 2.
    """
    host, rest = Parser(prog="submit.py", add_help=False), list(flags)
    host.add_argument("--host")
    if host.parse_known_args(rest)[0].host == "open_lm":
        return
    embedded = parse_args(rest).embedded
    named, _, count = args.gpus_per_node.rpartition(":")
    if count == "0" or embedded:
        return
    kind = args.gpu or next((gpu for gpu in GPUS if gpu.lower() == named.lower()), None)
    if kind is None:
        print("memory was not checked: name the GPUs with --gpu", file=sys.stderr)
        return
    own = ["--gpu", kind, "--gpus", str(args.nodes * int(count)), "--gpus-per-node", count]
    asked = command.parse([*rest, *own])
    plan = report.as_dict(command.job_from(asked), command.gpu_from(asked), placed=True)
    if plan["fits"] or args.force:
        return
    need, have = (plan["memory_bytes"][key] / 2**30 for key in ("peak", "available"))
    advice = plan["advice"]
    change = f"; it fits with {merged(advice)}" if advice and advice[-1]["fits"] else ""
    raise UserError(
        f"the job needs {need:.1f} GiB on a {kind}, which has {have:.1f} free{change} "
        "(python -m openlm_moe.plan says more; --force submits it as it is)"
    )


def merged(advice: Sequence[Mapping[str, Any]]) -> str:
    """The flags of several changes on top of each other; of one that is named twice, the last value."""
    values: dict[str, list[str]] = {}
    for word in (word for change in advice for word in change["flags"]):
        if word.startswith("--"):
            values[flag := word] = []
        else:
            values[flag].append(word)
    return " ".join(word for flag, words in values.items() for word in (flag, *words))


def render(args: argparse.Namespace, logs: Path, name: str | None, flags: Sequence[str]) -> str:
    """The text of the batch script: slurm.sbatch with these settings in place of its own."""
    options = {
        "job-name": args.job_name,
        "nodes": args.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": None if args.gpus_per_node == "0" else args.gpus_per_node,
        "time": args.time,
        "signal": f"B:USR1@{args.save_before}",
        "requeue": True,
        "open-mode": "append",
        "output": logs / "slurm" / "%x-%j.out",
        **{option: getattr(args, option.replace("-", "_")) for option in PASSED_ON},
    }
    header = [
        f"#SBATCH --{key}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for key, value in options.items()
        if value
    ]
    header += [f"#SBATCH --{option.lstrip('-')}" for option in args.sbatch]
    run_name = shlex.quote(name) if name else "$SLURM_JOB_NAME-$SLURM_JOB_ID"
    header += [f"LAUNCH_DIR={shlex.quote(str(LAUNCH))}", f"RUN_LOGS={shlex.quote(str(logs))}", f"RUN_NAME={run_name}"]
    header += [f"export PROCESSES={args.processes_per_node}"] if args.processes_per_node else []
    header += [f"export PATH={shlex.quote(str(args.bin))}:$PATH", f"set -- {shlex.join(flags)}"]
    shebang, *lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    return "\n".join([shebang, *header, *(line for line in lines if not line.startswith("#SBATCH"))]) + "\n"


def submit(script: str, folder: Path, job_name: str) -> str:
    """Writes the script into `folder` under the job's id, which it returns. Raises `UserError` if sbatch refuses it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{job_name}.sbatch"
    written.write_text(script)
    try:
        done = subprocess.run(["sbatch", "--parsable", written], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"sbatch is not on PATH: submit {written} on a host that has SLURM") from None
    if done.returncode != 0:
        raise UserError(f"sbatch refused {written}: {done.stderr.strip()}")
    job = re.split(r"[;\s]", done.stdout)[0]
    written.rename(folder / f"{job_name}-{job}.sbatch")
    return job


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a mistake that the person who submits can mend."""
    own, flags = split_arguments(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(own)
    try:
        logs, name, rest = take_run_flags(flags)
        check_flags(args, rest)
        script = render(args, logs, name, rest)
        if args.dry_run:
            print(script, end="")
            return 0
        job = submit(script, logs / "slurm", args.job_name)
    except UserError as error:
        print(f"submit.py: error: {error}", file=sys.stderr)
        return 2
    print(f"submitted job {job}; its output: {logs / 'slurm' / f'{args.job_name}-{job}.out'}")
    print(f"run folder: {logs / (name or f'{args.job_name}-{job}')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
