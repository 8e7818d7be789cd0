"""results/gpu/run.py: its steps, small and on a CPU; slices, going on, failures, and a machine without hypothesis."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from results.gpu import run as runner
from results.gpu.steps import Step, gpu_steps, tiny_steps
from results.gpu.table import KINDS

PROGRAM = Path(runner.__file__)

# Loaded by each process: packages that torch, triton, numpy, transformers and pytest do not bring are not found.
BARE = """
import functools, importlib.machinery
LEFT_OUT = {
    "accelerate", "execnet", "hypothesis", "jax", "lm_eval", "matplotlib", "pandas", "PIL", "pyarrow", "pytest_timeout",
    "rich", "tensorboard", "wandb", "webdataset", "xdist", "zstandard",
}
find = importlib.machinery.PathFinder.find_spec
def find_fewer(name, path=None, target=None):
    spec = find(name, path, target)
    left_out = spec and name in LEFT_OUT and "without_hypothesis" not in str(spec.origin)
    return None if left_out else spec
importlib.machinery.PathFinder.find_spec = functools.partial(find_fewer)  # no method: pytest keeps it in a class
"""


def tiny(run, out: Path, *more: object):
    """`run.py --tiny` as on a bare machine, and without pytest's plugins."""
    bare = out.parent / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "sitecustomize.py").write_text(BARE)
    env = {"PYTHONPATH": str(bare), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run([sys.executable, PROGRAM, "--tiny", "--out", out, *more], timeout=800, env=env)


@pytest.mark.interpreter
@pytest.mark.timeout(600)
def test_it_is_right_and_it_trains(run, tmp_path: Path) -> None:
    """Kernel tests in the interpreter, training against the reference, memory; then nothing is left."""
    chosen = [word for step in ("tests", "train", "memory") for word in ("--only", step)]
    tmp_path = tmp_path / "out"
    done = tiny(run, tmp_path, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json") if path.stem != "tiny_model"}
    assert found.keys() == {"tests-test_tiles", "train", "memory-tiny"}
    assert found["tests-test_tiles"]["result"]["passed"] > 5
    assert "test_any_sizes PASSED" in (tmp_path / "tests-test_tiles.log").read_text()  # hypothesis is left out
    train = found["train"]["result"]
    assert len(train["here"]) == len(train["cpu"]) == 6
    assert 0 < train["early"] < 1e-5  # apart by rounding: two backends, not one run twice
    assert train["here"][-1] < train["here"][0]
    memory = found["memory-tiny"]["result"]
    assert memory["state"] == memory["plan_state"] < memory["plan"]
    assert "Not run: model-tiny" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Nothing is left. No step failed.")
    again = tiny(run, tmp_path, *chosen)
    assert again.returncode == 0
    assert "..." not in again.stdout
    assert (tmp_path / "table.md").read_text() in again.stdout


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(900)
def test_every_kind_of_step(run, tmp_path: Path) -> None:
    tmp_path = tmp_path / "out"
    done = tiny(run, tmp_path, "--minutes", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {json.loads((tmp_path / f"{s.name}.json").read_text())["kind"] for s in tiny_steps(tmp_path)} == set(KINDS)
    for head in ("tests of the compiled", "training, fp32", "full steps", "one layer", "products", "tuned", "GiB"):
        assert f"| {head}" in done.stdout


def python(name: str, code: str, limit: int = 60) -> Step:
    return Step(name, "layer", (sys.executable, "-c", code, "{made}"), limit)


def test_a_slice_ends_in_time_and_the_next_goes_on(tmp_path: Path, monkeypatch) -> None:
    write = "import sys; open(sys.argv[1], 'w').write('[]')"
    steps = [python("one", write), python("two", write, limit=200), python("three", write)]
    clock = [1000.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    left = runner.run_slice(steps, tmp_path, end=1100.0)
    assert [step.name for step in left] == ["two", "three"]  # two might not end in time, and the order is kept
    assert runner.record_of(steps[0], tmp_path).exists()
    before = runner.record_of(steps[0], tmp_path).stat().st_mtime_ns
    assert runner.run_slice(steps, tmp_path, end=1200.0) == []
    assert runner.record_of(steps[0], tmp_path).stat().st_mtime_ns == before
    assert json.loads(runner.record_of(steps[1], tmp_path).read_text())["result"] == []


def test_failures_and_timeouts_are_recorded_and_told(tmp_path: Path) -> None:
    steps = [
        python("fails", "raise SystemExit('no such tile')"),
        python("hangs", "import time; time.sleep(60)", limit=1),
    ]
    failed, hung = (runner.run_step(step, tmp_path) for step in steps)
    assert (failed["exit_code"], failed["end_of_output"], failed["result"]) == (1, ["no such tile"], None)
    assert hung["exit_code"] == "timeout"
    for step, record in zip(steps, (failed, hung), strict=True):
        runner.record_of(step, tmp_path).write_text(json.dumps(record))
    text = runner.write_table(steps, tmp_path)
    assert "- fails: 1: no such tile" in text
    assert "- hangs: timeout" in text


def test_a_timeout_ends_what_the_step_started(tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert runner.run_step(python("hangs", code, limit=1), tmp_path)["exit_code"] == "timeout"
    time.sleep(2)
    assert not late.exists()


def test_the_steps_on_a_gpu_fit_into_a_slice_and_have_names_of_their_own(tmp_path: Path) -> None:
    steps = gpu_steps(tmp_path)
    assert max(step.limit for step in steps) < 8 * 60
    assert len({step.name for step in steps}) == len(steps)
    assert {step.kind for step in steps} == set(KINDS)
    assert len([s for s in steps if s.kind == "tests"]) > 5
    tuned = [s for s in steps if s.name.startswith("tuned-")]
    tables = {str(word) for s in steps if s.kind == "tune" for word in s.command if str(word).endswith(".table.json")}
    assert {s.env["OPENLM_MOE_KERNEL_TABLE"] for s in tuned} == tables


def test_the_commands_on_a_gpu_are_known(tmp_path: Path) -> None:
    """Each benchmark's flags parse; where there is no GPU, nothing else of them can be tried."""
    from openlm_moe.bench import kernels, layer, model, tune
    from openlm_moe.options import Parser

    rooms = {"kernels": kernels, "layer": layer, "model": model, "tune": tune}
    seen = set()
    for step in gpu_steps(tmp_path):
        if "openlm_moe.bench" in step.command:
            _, _, _, room, *words = map(str, step.command)
            parser = Parser()
            rooms[room].add_arguments(parser)
            parser.parse_args(words)
            seen.add(room)
    assert seen == rooms.keys()


def test_without_hypothesis_examples_are_still_drawn(run, tmp_path: Path) -> None:
    test = tmp_path / "test_drawn.py"
    test.write_text(
        "import pytest\n"
        "from hypothesis import HealthCheck, given, settings\n"
        "from hypothesis import strategies as st\n"
        "sizes = st.lists(st.one_of(st.just(0), st.integers(3, 5)), min_size=1, max_size=4).map(tuple)\n"
        "case = st.builds(dict, sizes=sizes, flag=st.booleans(), odd=st.integers(0, 9).filter(lambda n: n % 2))\n"
        "seen = []\n"
        "@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])\n"
        "@given(case=case)\n"
        "def test_all(case, tmp_path):\n"
        "    assert set(case['sizes']) <= {0, 3, 4, 5} and 1 <= len(case['sizes']) <= 4 and case['odd'] % 2\n"
        "    seen.append(case)\n"
        "@settings(max_examples=25)\n"
        "@given(n=st.integers(0, 9))\n"
        "def test_fails(n):\n"
        "    assert n < 7\n"
        "def test_many():\n"
        "    assert len(seen) == 25 and len({str(case) for case in seen}) > 15\n"
    )
    path = PROGRAM.parent / "without_hypothesis"
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", test],
        env={"PYTHONPATH": str(path)},
        cwd=tmp_path,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "example " in done.stdout and "{'n': " in done.stdout
