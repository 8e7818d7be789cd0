"""wandb as it really is: offline files, a server on loopback, and servers that are down, slow or cut off."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.telemetry import Sinks
from openlm_moe.telemetry.jsonl import read_records


def load(name: str) -> ModuleType:
    """A helper module that stands beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


wandb_file, loopback = load("wandb_file"), load("loopback")
WARNING = "warning: wandb is not reachable"
RESUMED_STEPS = [1, 2, 3, 4, 5, 4, 5, 6, 7]  # steps 1..5, then a resume from step 3


def run_id(folder: Path) -> str:
    return (folder / "wandb_run_id").read_text().strip()


@pytest.fixture(scope="module")
def resumed(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an offline run: RESUMED_STEPS in two starts."""
    folder = tmp_path_factory.mktemp("offline") / "run"
    train(folder, 1, 5)
    train(folder, 4, 7)
    return folder


def test_offline_files_hold_every_row_of_a_resumed_run(resumed: Path) -> None:
    first, second = wandb_file.offline_runs(resumed)
    assert first.run.run_id == second.run.run_id == run_id(resumed)
    assert (first.run.project, first.run.display_name) == ("tests", "run")
    rows = first.history + second.history
    assert [row["step"] for row in rows] == RESUMED_STEPS
    assert [row["tokens"] for row in rows] == [1000 * step for step in RESUMED_STEPS]
    assert [row["_step"] for row in rows] == list(range(9)), "wandb drops a row whose step is not above the last one"
    assert [row["train/loss"] for row in rows] == pytest.approx([10 / step for step in RESUMED_STEPS])
    for run in (first, second):
        assert [(m.name, m.glob_name, m.step_metric) for m in run.metrics] == [("tokens", "", ""), ("", "*", "tokens")]
        assert run.exit_code == 0


def test_offline_config_holds_moe_fields_versions_and_commit(resumed: Path) -> None:
    for run in wandb_file.offline_runs(resumed):
        assert run.config["moe"] == MoEConfig(layers=(0, 2)).to_dict()
        assert run.config["lr"] == 3e-4
        assert run.config["versions"]["torch"] and run.config["versions"]["wandb"] and run.config["versions"]["python"]
        assert "commit" in run.config


def test_expert_load_is_a_histogram_with_a_bin_per_expert(resumed: Path) -> None:
    row = wandb_file.offline_runs(resumed)[1].history[0]
    load = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("experts/layer_0/load/")}
    assert load == {"_type": "histogram", "values": [0.1, 0.2, 0.3, 0.4], "bins": [0, 1, 2, 3, 4]}
    assert row["experts/layer_0/max_over_mean"] == pytest.approx(1.6)


def test_only_rank_0_writes(train: Callable[..., Any], tmp_path: Path) -> None:
    train(tmp_path / "run", 1, 2, rank=1)
    assert list((tmp_path / "run").iterdir()) == []


def test_server_holds_every_row_after_offline_sync(
    run: Callable[..., Any], server: Any, resumed: Path, tmp_path: Path
) -> None:
    fragments = sorted((resumed / "wandb").glob("offline-run-*"))
    wandb = Path(sys.executable).with_name("wandb")
    synced = run([wandb, "sync", *fragments], env={**server.env, "HOME": str(tmp_path)})
    assert synced.returncode == 0, synced.stdout + synced.stderr
    assert server.values(run_id(resumed), "step") == list(enumerate(RESUMED_STEPS))
    assert server.values(run_id(resumed), "tokens") == [(i, 1000 * step) for i, step in enumerate(RESUMED_STEPS)]
    config = server.get(f"/api/v2/runs/{run_id(resumed)}/config")["config"]
    assert str(MoEConfig().capacity_factor) in str(config["moe"])


def test_requeued_run_goes_on_online_under_the_same_id(train: Callable[..., Any], server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train(folder, 1, 5, env=server.env)
    assert WARNING not in result.output
    first_id = run_id(folder)
    train(folder, 4, 7, env=server.env)
    assert run_id(folder) == first_id
    assert server.values(first_id, "step") == list(enumerate(RESUMED_STEPS))
    losses = [value for _, value in server.values(first_id, "train/loss")]
    assert losses == pytest.approx([10 / step for step in RESUMED_STEPS])


@pytest.mark.slow
def test_a_killed_run_goes_on_under_the_same_id(train: Callable[..., Any], server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, 1, 5, env=server.env, die=True)
    first_id = run_id(folder)
    train(folder, 4, 7, env=server.env)
    assert run_id(folder) == first_id
    assert [step for _, step in server.values(first_id, "step")][-4:] == [4, 5, 6, 7]
    assert [record["step"] for record in read_records(folder)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["down", "no key", pytest.param("silent", marks=pytest.mark.slow)])
def test_without_service_the_run_is_offline_and_no_step_waits(
    train: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "run"
    with loopback.silent_server() as silent:
        env = {"WANDB_MODE": "online", "WANDB_BASE_URL": silent if kind == "silent" else "http://127.0.0.1:9"}
        if kind != "no key":
            env["WANDB_API_KEY"] = "local-" + "0" * 40
        result = train(folder, 1, 5, env=env, init_timeout=1)
    assert result.output.count(WARNING) == 1
    assert result.output.count("warning:") == 1
    assert result.seconds["open"] < 5
    assert result.seconds["slowest_log"] < 0.1
    assert [row["step"] for row in read_records(folder)] == [1, 2, 3, 4, 5]
    (offline,) = wandb_file.offline_runs(folder)
    assert [row["step"] for row in offline.history] == [1, 2, 3, 4, 5]
    assert offline.config["moe"]["num_experts"] == 8


@pytest.mark.slow
def test_service_lost_in_mid_run(train: Callable[..., Any], server: Any, tmp_path: Path) -> None:
    folder, relay = tmp_path / "run", loopback.Relay(server.url)
    env = {**server.env, "WANDB_BASE_URL": relay.url}
    with ThreadPoolExecutor() as pool:
        future = pool.submit(train, folder, 1, 500, env=env, pause_after=3, finish_timeout=3)
        while not (folder / "paused").exists() and not future.done():
            time.sleep(0.05)
        relay.cut()
        (folder / "go_on").touch()
        result = future.result()
    relay.close()
    assert result.seconds["slowest_log"] < 5  # the pause itself is outside
    assert result.seconds["close"] < 30
    assert len(read_records(folder)) == 500
    (local,) = (folder / "wandb").glob("run-*")
    assert [row["step"] for row in wandb_file.RunFile(local).history] == list(range(1, 501))


class DroppingRun:
    """Does with steps what wandb's service does: a row whose step is not above the last one is dropped."""

    step = 0

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.metrics: list[tuple[str, str | None]] = []

    def log(self, row: dict[str, Any], step: int) -> None:
        if step >= DroppingRun.step:
            DroppingRun.step = step + 1
            self.rows.append(row)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_resume_from_an_older_step_loses_no_row_to_a_wandb_that_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[DroppingRun] = []
    stub = ModuleType("wandb")
    stub.Settings = lambda **settings: settings
    stub.setup = lambda: type("Setup", (), {"settings": type("S", (), {"mode": "online"})})
    stub.login = lambda **options: True
    stub.init = lambda **options: runs.append(DroppingRun()) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(DroppingRun, "step", 0)
    for first, last in ((1, 5), (4, 7), (2, 8)):
        sinks = Sinks(tmp_path, ["wandb"], resume_step=first - 1)
        for step in range(first, last + 1):
            sinks.log({"train/loss": 1.0}, step=step, tokens=step * 10)
        sinks.close()
    tokens = [row["tokens"] for run in runs for row in run.rows]
    assert tokens == [10 * step for step in [*RESUMED_STEPS, *range(2, 9)]]
    assert runs[0].metrics == [("tokens", None), ("*", "tokens")]


def test_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'pip install "openlm-moe\[wandb\]"'):
        Sinks(tmp_path, ["wandb"])
