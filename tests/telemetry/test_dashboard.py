"""The workspace as code: its spec is dashboard.golden.json, which this file rewrites when it is run as a script."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from openlm_moe.errors import UserError
from openlm_moe.telemetry import dashboard, metrics

GOLDEN = Path(__file__).with_name("dashboard.golden.json")
LAYERS = [0, 2]
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    pytest.importorskip("wandb_workspaces")
    return dashboard.spec(dashboard.workspace("team", "project", LAYERS))


def panels(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{title: config} of all panels."""
    sections = spec["section"]["panelBankConfig"]["sections"]
    return {panel["config"]["chartTitle"]: panel["config"] for section in sections for panel in section["panels"]}


def test_spec_is_the_golden_one(spec: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert spec == golden, f"if this change is meant: python {Path(__file__).name}, and look at the difference"


def test_every_panel_that_people_look_at_is_there(spec: dict[str, Any]) -> None:
    found = panels(spec)
    single = {
        "Tokens/s per GPU": "train/samples_per_second_per_gpu",
        "MFU": "train/mfu",
        "Load-balancing loss": "train/load_balancing_loss",
        "Router z-loss": "train/router_z_loss",
        "Max violation": "experts/max_violation",
        "Gradient norm": "train/grad_norm",
        "Peak memory (GiB)": "train/peak_memory",
        "Load per expert, layer 0": "experts/layer_0/load",
        "Load per expert, layer 2": "experts/layer_2/load",
    }
    assert {title: found[title]["metrics"] for title in single} == {title: [name] for title, name in single.items()}
    x_axes = {title: config["xAxis"] for title, config in found.items()}
    assert x_axes.pop("Perplexity over active FLOPs") == "train/active_flops"
    assert set(x_axes.values()) == {"tokens"}
    assert spec["section"]["settings"]["xAxis"] == "tokens"


def test_patterns_catch_the_metrics_they_are_meant_for(spec: dict[str, Any]) -> None:
    def caught(title: str, *names: str) -> list[bool]:
        return [bool(re.search(panels(spec)[title]["metricRegex"], name)) for name in names]

    valid = metrics.valid_metric("stdlib", "perplexity")
    for title in ("Perplexity over tokens", "Perplexity over active FLOPs"):
        assert caught(title, metrics.PERPLEXITY, valid, metrics.LOSS) == [True, True, False]
    layers = [metrics.layer_metric(12, what) for what in ("max_violation", "entropy", "load")]
    assert caught("Max violation per layer", *layers, metrics.MAX_VIOLATION) == [True, False, False, False]
    assert caught("Routing entropy per layer", *layers) == [False, True, False]


def test_every_metric_is_a_documented_one(spec: dict[str, Any]) -> None:
    for title, config in panels(spec).items():
        for name in [config["xAxis"], *config["metrics"]]:
            assert metrics.describe(name) is not None, f"{title} shows {name}, which nothing logs"


def test_layers_come_from_the_runs_that_have_logged_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked = []

    class Api:
        def runs(self, path: str, **more: Any) -> list[Any]:
            asked.append(path)
            return [SimpleNamespace(summary={name: 1}) for name in names]

    monkeypatch.setattr(wandb, "Api", Api)
    names = ["experts/layer_10/load", "experts/layer_2/entropy", "train/loss"]
    assert dashboard.moe_layers("team", "project") == [2, 10]
    assert asked == ["team/project"]
    names = ["train/loss"]
    with pytest.raises(UserError, match="--layers 0,2,4"):
        dashboard.moe_layers("team", "project")


def test_command_saves_the_view(run: Callable[..., Any], tmp_path: Path, spec: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "openlm_moe.telemetry.dashboard", "--entity", "team", "--project", "project"]
    with load("loopback").graphql_server() as (url, views):
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "local-" + "0" * 40, "WANDB_MODE": "online"}
        env |= {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
        process = run([*command, "--layers", "0,2"], env=env)
    assert process.returncode == 0, process.stderr
    (view,) = views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "project", dashboard.VIEW)
    assert dashboard._without_ids(json.loads(view["spec"])) == spec
    assert "/team/project?nw=" in process.stdout


def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: dict[str, Any]
) -> None:
    def refuse(view: Any) -> None:
        raise ValueError("permission\ndenied")

    monkeypatch.setattr("wandb_workspaces.workspaces.internal.upsert_view2", refuse)
    command = ["--entity", "team", "--project", "project", "--layers", "0"]
    assert dashboard.main(command) == 2
    assert capsys.readouterr().err.endswith("error: wandb refuses team/project: permission denied\n")
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert dashboard.main(command) == 2
    assert 'pip install "openlm-moe[dashboard]"' in capsys.readouterr().err


if __name__ == "__main__":
    made = dashboard.spec(dashboard.workspace("team", "project", LAYERS))
    GOLDEN.write_text(json.dumps(made, indent=2) + "\n")
