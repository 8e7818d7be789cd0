"""Everything that needs a GPU, in one command that goes on where it stopped:

    python results/gpu/run.py                    again, until it says that nothing is left
    python results/gpu/run.py --tiny --out /tmp/tiny     the same steps, small, on a CPU: does this work at all?

Needs torch, triton, numpy, transformers and pytest, no network and no installation of this project. A call starts no
step that could end after --minutes. Each step leaves a small JSON record and its output in --out; one that is there
already is not done again, unless --again names it. The table is printed last and written to table.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openlm_moe.data.cache import write_atomically
from results import records
from results.gpu.steps import Step, gpu_steps, tiny_steps
from results.gpu.table import render

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "gpu" / "record"
TEST_WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECORD, help="folder of the records (%(default)s)")
    parser.add_argument("--minutes", type=float, default=8, help="length of a slice (%(default)s)")
    parser.add_argument("--only", action="append", metavar="START", help="steps whose names begin so; repeatable")
    parser.add_argument("--again", action="append", default=[], metavar="STEP", help="do this step anew; repeatable")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    if not options.tiny:
        require_gpu()
    steps = tiny_steps(out) if options.tiny else gpu_steps(out)
    chosen = [step for step in steps if step.name.startswith(tuple(options.only or ("",)))]
    for name in options.again:
        if name not in [step.name for step in chosen]:
            parser.error(f"--again {name} is no step of these: {', '.join(step.name for step in chosen)}")
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} begins no step of: {', '.join(step.name for step in steps)}")
    for step in chosen:
        if step.name in options.again:
            record_of(step, out).unlink(missing_ok=True)
    left = run_slice(chosen, out, time.monotonic() + 60 * options.minutes)
    print(write_table(steps, out))
    if left:
        print(f"\n{len(left)} of {len(chosen)} steps are left, {left[0].name} is next: run the same command again.")
        return 3
    failed = [step.name for step in chosen if json.loads(record_of(step, out).read_text())["exit_code"]]
    print(f"\nNothing is left. {'Failed: ' + ', '.join(failed) if failed else 'No step failed.'} Records: {out}")
    return 1 if failed else 0


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --tiny tries the steps on a CPU")


def run_slice(steps: list[Step], out: Path, end: float) -> list[Step]:
    """Does the steps without a record that surely end in time, in order; returns those that are left."""
    left = []
    for step in steps:
        if record_of(step, out).exists():
            continue
        if left or time.monotonic() + step.limit > end:
            left.append(step)
            continue
        print(f"{step.name} ...", flush=True)
        record = run_step(step, out)
        write_atomically(record_of(step, out), (json.dumps(record, indent=1) + "\n").encode())
        print(f"{step.name}: exit code {record['exit_code']}, {record['seconds']} s", flush=True)
    return left


def run_step(step: Step, out: Path) -> dict:
    """Runs one command to its end or its limit; what it wrote as JSON becomes part of the record."""
    made = out / f"{step.name}.part"
    made.unlink(missing_ok=True)
    command = [str(word).replace("{made}", str(made)) for word in step.command]
    log = out / f"{step.name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        how = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment(step.env), "cwd": ROOT}
        process = subprocess.Popen(command, start_new_session=True, **how)
        try:
            code: int | str = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            code = "timeout"
        finally:  # what measures in a process of its own must not go on beside the next step
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    result = json.loads(made.read_text()) if made.exists() and code == 0 else None
    made.unlink(missing_ok=True)
    if step.kind == "tests":
        result = {word.lower(): len(re.findall(rf" {word}\b", text)) for word in TEST_WORDS}
    elif step.kind == "tune" and code == 0:
        result = [line for line in text.splitlines() if " configurations: " in line]
    return {
        "name": step.name,
        "kind": step.kind,
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "command": command[1:],
        "result": result,
        "end_of_output": [] if code == 0 else text.splitlines()[-15:],
        **records.origin(),
    }


def environment(more: dict[str, str]) -> dict[str, str]:
    """Of a step's process: this checkout on the path, and a substitute for hypothesis where that is not installed."""
    paths = [ROOT, ROOT / "kernels"]
    if subprocess.run([sys.executable, "-c", "import hypothesis"], capture_output=True).returncode:
        paths.append(Path(__file__).parent / "without_hypothesis")
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]), **more}


def record_of(step: Step, out: Path) -> Path:
    return out / f"{step.name}.json"


def write_table(steps: list[Step], out: Path) -> str:
    """The table of all steps, those of earlier calls included; also in table.md."""
    found = [json.loads(record_of(s, out).read_text()) for s in steps if record_of(s, out).exists()]
    missing = [s.name for s in steps if not record_of(s, out).exists()]
    text = render(found, missing)
    (out / "table.md").write_text(text + "\n")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
