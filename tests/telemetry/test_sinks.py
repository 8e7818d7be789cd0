"""Console, metrics.jsonl and tensorboard: what a run leaves behind, over restarts and failures."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.telemetry import Sinks, expert_loads, parse_report_to
from openlm_moe.telemetry.console import Console, duration, plain_line, short
from openlm_moe.telemetry.jsonl import read_records


def log_steps(folder: Path, first: int, last: int, **options: Any) -> None:
    with Sinks(folder, resume_step=first - 1, **options) as sinks:
        for step in range(first, last + 1):
            sinks.log({"train/loss": float(step)}, step=step, tokens=100 * step)


def raw_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resume_from_an_older_step_leaves_each_step_once(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 5)
    log_steps(tmp_path, 4, 7)
    assert raw_steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    assert raw_steps(tmp_path / "metrics.superseded.jsonl") == [4, 5]
    assert [r["tokens"] for r in read_records(tmp_path)] == [100, 200, 300, 400, 500, 600, 700]


def test_wall_time_goes_on_where_the_resumed_step_left_it(tmp_path: Path) -> None:
    line = {"step": 3, "tokens": 300, "wall_time": 1000.0}
    later = {"step": 4, "tokens": 400, "wall_time": 5000.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(later) + "\n")
    log_steps(tmp_path, 4, 5)
    times = [r["wall_time"] for r in read_records(tmp_path)]
    assert times[0] == 1000.0
    assert 1000.0 < times[1] < times[2] < 1100.0


def test_a_step_keeps_the_time_at_which_it_was_done(tmp_path: Path) -> None:
    with Sinks(tmp_path) as sinks:
        sinks.log({"train/loss": 1.0}, step=1, tokens=10)
        sinks._opened -= 100  # an evaluation that takes its time
        sinks.log({"valid/stdlib/loss": 2.0}, step=1, tokens=10)
    (record,) = read_records(tmp_path)
    assert record["wall_time"] < 50
    assert (record["train/loss"], record["valid/stdlib/loss"]) == (1.0, 2.0)


def test_a_second_start_of_a_live_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openlm_moe.telemetry.jsonl.WAIT", 0.0)
    for first in (1, 3):  # in a new folder, and in one with a history
        with Sinks(tmp_path, resume_step=first) as sinks:
            sinks.log({"train/loss": 1.0}, step=first, tokens=10)
            with pytest.raises(UserError, match=r"another process is writing to .*; let that run end"):
                Sinks(tmp_path, resume_step=0)
            sinks.log({"train/loss": 1.0}, step=first + 1, tokens=20)
    assert raw_steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"tok')
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2]
    log_steps(tmp_path, 3, 4)
    assert raw_steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_each_record_is_on_disk_at_once(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path)
    sinks.log({"train/loss": 2.5}, step=1, tokens=10)
    assert read_records(tmp_path)[0]["train/loss"] == 2.5
    sinks.close()


def test_values_of_all_kinds(tmp_path: Path) -> None:
    with Sinks(tmp_path) as sinks:
        values = {"train/loss": torch.tensor(1.5), "train/mfu": None, "train/grad_norm": math.nan, "train/lr": 1e-3}
        sinks.log(values | expert_loads({0: torch.tensor([1, 3])}), step=1, tokens=10)
        sinks.log({"valid/stdlib/perplexity": math.inf}, step=1, tokens=10)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    (record,) = read_records(tmp_path)
    assert record["train/loss"] == 1.5
    assert "train/mfu" not in record
    assert math.isnan(record["train/grad_norm"])
    assert record["experts/layer_0/load"] == [0.25, 0.75]
    assert math.isnan(record["valid/stdlib/perplexity"])


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinks = Sinks(tmp_path, ["tensorboard", "wandb"], rank=1)
    sinks.config({"a": 1})
    sinks.log({"train/loss": 1.0}, step=1, tokens=1)
    sinks.say("hello")
    sinks.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_config_is_recorded_with_versions_and_commit(tmp_path: Path) -> None:
    with Sinks(tmp_path, name="first") as sinks:
        sinks.config({"moe": MoEConfig().to_dict()})
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["name"] == "first"
    assert document["config"]["moe"] == MoEConfig().to_dict()
    assert document["config"]["versions"]["torch"] == torch.__version__
    assert "commit" in document["config"]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, 1, 5, report_to=["tensorboard"])
    log_steps(tmp_path, 4, 7, report_to=["tensorboard"])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert points == [(step, float(step)) for step in range(1, 8)]


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r'pip install "openlm-moe\[tensorboard\]"'):
        Sinks(tmp_path, ["tensorboard"])


def test_report_to() -> None:
    assert parse_report_to("wandb") == ("wandb",)
    assert parse_report_to("tensorboard,wandb, wandb") == ("tensorboard", "wandb")
    assert parse_report_to("all") == ("tensorboard", "wandb")
    assert parse_report_to("") == parse_report_to("none") == ()
    with pytest.raises(UserError, match="'wandv'"):
        parse_report_to("wandv")


def test_a_failing_sink_warns_once_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = Sinks(tmp_path)

    class Broken:
        def log(self, record: dict[str, Any]) -> None:
            raise OSError("disk full")

        def close(self, exit_code: int = 0) -> None:
            pass

    sinks._sinks = {"broken": Broken(), **sinks._sinks}
    for step in (1, 2):
        sinks.log({"train/loss": 1.0}, step=step, tokens=step)
    sinks.close()
    assert capsys.readouterr().out.count("warning: broken takes no metrics (OSError: disk full)") == 1
    assert raw_steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_unwritable_folder_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl.*name another folder"):
        Sinks(tmp_path / "absent")


RECORD = {
    "step": 20,
    "tokens": 1_200_000,
    "wall_time": 60.0,
    "train/loss": 5.1234,
    "train/perplexity": 167.9,
    "train/samples_per_second": 12_345.0,
    "train/lr": 3e-4,
    "train/mfu": 0.412,
    "train/load_balancing_loss": 0.1012,
    "experts/max_violation": 0.52,
}


def test_plain_line() -> None:
    assert plain_line(RECORD, total_tokens=4_000_000) == (
        "step 20 | tokens 1.2M/4M | loss 5.1234 | ppl 168 | tokens/s 12.3k | mfu 41.2% | lr 3.00e-04 | "
        "balance 0.1012 | load max/mean 1.52 | eta 3:46"
    )


def test_console_prints_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path, 4_000_000, stream=stream)
    console.log(RECORD)
    console.log({"step": 20, "tokens": 1_200_000, "valid/stdlib/loss": 4.5, "valid/stdlib/perplexity": 90.0171})
    console.say("checkpoint saved")
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == plain_line(RECORD, 4_000_000)
    assert lines[1] == "step 20 | tokens 1.2M/4M | stdlib loss 4.5000 | stdlib ppl 90"
    assert lines[2] == "checkpoint saved"
    logged = (tmp_path / "out.log").read_text().splitlines()
    assert [line[20:] for line in logged] == lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    stream = Terminal()
    console = Console(tmp_path, 4_000_000, tokens=400_000, stream=stream)
    console.log(RECORD)
    console.say("checkpoint saved")
    console.close()
    shown = stream.getvalue()
    assert "30%" in shown
    assert "1.20M/4.00M" in shown
    assert "loss 5.1234" in shown
    assert "checkpoint saved\n" in shown
    assert "loss 5.1234" in (tmp_path / "out.log").read_text()


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999, "999"), (999.7, "1k"), (12_345, "12.3k"), (1.5e9, "1.5B"), (2e12, "2T")]
)
def test_short(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (3725, "1:02:05"), (360_000, "100:00:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
