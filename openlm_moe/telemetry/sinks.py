"""Where metrics go: console, metrics.jsonl, tensorboard, wandb. Rank 0 only; a failing sink never stops training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from openlm_moe.errors import UserError
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.console import Console
from openlm_moe.telemetry.environment import environment
from openlm_moe.telemetry.jsonl import JsonlSink

REPORTERS = ("tensorboard", "wandb")
RUN_FILE = "run.json"


class Sink(Protocol):
    def log(self, record: dict[str, Any]) -> None: ...
    def close(self, exit_code: int = 0) -> None: ...


def parse_report_to(text: str) -> tuple[str, ...]:
    """'wandb,tensorboard' -> ('wandb', 'tensorboard'); 'all' names every reporter, '' and 'none' no one.

    Raises `UserError` for a name that is not in REPORTERS.
    """
    names = [name for name in text.replace(",", " ").split() if name != "none"]
    if "all" in names:
        return REPORTERS
    for name in names:
        if name not in REPORTERS:
            raise UserError(f"--report-to names {name!r}; it knows {', '.join(REPORTERS)}, all and none")
    return tuple(dict.fromkeys(names))


class Sinks:
    """All sinks of one run.

    folder        the run's folder; it must exist
    report_to     any of REPORTERS, beside console and metrics.jsonl, which are always there
    rank          every rank may hold a Sinks; only rank 0's does anything
    resume_step   the step of the checkpoint that the run goes on from; what was logged after it is superseded
    total_tokens  tokens of the whole run, for progress and ETA
    name, project, entity, group   what wandb calls the run

    Raises `UserError` when a reporter's package is missing or the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        report_to: Iterable[str] = (),
        *,
        rank: int = 0,
        resume_step: int = 0,
        total_tokens: int | None = None,
        name: str | None = None,
        project: str = "open-lm",
        entity: str | None = None,
        group: str | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._name = name or self._folder.name
        self._active = rank == 0
        self._total_tokens = total_tokens
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()
        self._console: Console | None = None
        if not self._active:
            return
        jsonl = JsonlSink(self._folder, resume_step)
        self._wall_time_before = float(jsonl.last.get(metrics.WALL_TIME) or 0.0)
        self._opened = time.monotonic()
        self._sinks["metrics.jsonl"] = jsonl
        report_to = tuple(report_to)
        if "tensorboard" in report_to:
            self._sinks["tensorboard"] = TensorboardSink(self._folder, resume_step)
        if "wandb" in report_to:
            from openlm_moe.telemetry.wandb_sink import WandbSink

            self._sinks["wandb"] = WandbSink(
                self._folder, self._name, project, entity, group, first_row=jsonl.rows_ever, warn=self.say
            )
        self._console = Console(self._folder, total_tokens, int(jsonl.last.get(metrics.TOKENS, 0)))
        self._sinks["console"] = self._console

    def config(self, values: dict[str, Any]) -> None:
        """Records the run's settings, with versions and commit added: in run.json, and in each reporter that can."""
        if not self._active:
            return
        everything = {**values, **environment()}
        document = {"name": self._name, "total_tokens": self._total_tokens, "config": everything}
        (self._folder / RUN_FILE).write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
        for sink in self._sinks.values():
            if hasattr(sink, "config"):
                sink.config(everything)

    def log(self, values: dict[str, Any], step: int, tokens: int) -> None:
        """Writes `values` (numbers, 0-dim tensors, lists of numbers; None is left out) to every sink.

        step: optimizer steps done; tokens: training tokens consumed over all ranks.
        """
        if not self._active:
            return
        wall_time = self._wall_time_before + time.monotonic() - self._opened
        record: dict[str, Any] = {metrics.STEP: int(step), metrics.TOKENS: int(tokens), metrics.WALL_TIME: wall_time}
        for name, value in values.items():
            if value is not None:
                record[name] = [float(v) for v in value] if isinstance(value, list | tuple) else float(value)
        for name, sink in self._sinks.items():
            try:
                sink.log(record)
            except Exception as error:  # a full disk or a reporter's bug must not end a run of days
                if name not in self._failed:
                    self._failed.add(name)
                    self.say(f"warning: {name} takes no metrics ({type(error).__name__}: {error}); training goes on")

    def say(self, text: str) -> None:
        """Prints one line for people, beside the progress bar if there is one; it also goes to out.log."""
        if self._console is not None:
            self._console.say(text)
        elif self._active:
            print(text, flush=True)

    def close(self, exit_code: int = 0) -> None:
        """Flushes and closes every sink; a second call does nothing. `exit_code` other than 0: the run has failed."""
        for name, sink in self._sinks.items():
            try:
                sink.close(exit_code)
            except Exception as error:
                self.say(f"warning: closing {name} failed ({type(error).__name__}: {error})")
        self._sinks = {}
        self._console = None

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(0 if kind is None else 1)


class TensorboardSink:
    """Scalars over steps in `folder`/tensorboard; points after `resume_step` are purged, as tensorboard calls it."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError('--report-to tensorboard needs: pip install "openlm-moe[tensorboard]"') from None
        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=30)

    def config(self, values: dict[str, Any]) -> None:
        self._writer.add_text("config", f"```\n{json.dumps(values, indent=2, default=str)}\n```")

    def log(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != metrics.STEP and not isinstance(value, list):
                self._writer.add_scalar(name, value, record[metrics.STEP])

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()
