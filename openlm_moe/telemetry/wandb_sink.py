"""wandb, kept at arm's length: one thread owns the run, and training only ever puts records into its queue.

A service that is down, slow or refuses the key therefore costs a warning; the run is then recorded offline, ready for
`wandb sync`. The x axis is "tokens" by define_metric, and wandb's own step is the number of rows ever logged, which
never goes back: wandb drops rows whose step does, and a run resumed from an older checkpoint goes back in its steps.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.telemetry import metrics

RUN_ID_FILE = "wandb_run_id"
INIT_TIMEOUT = 30.0  # seconds that wandb.init may take; training does not wait for it
FINISH_TIMEOUT = 30.0  # seconds that the end of a run waits for uploads
GRACE = 30.0  # what wandb adds to INIT_TIMEOUT before it gives up: it looks up the user twice, and waits 10 s more


def run_id(folder: Path) -> str:
    """The run's wandb id: $WANDB_RUN_ID, else the one that its folder remembers, else a new one for it to remember."""
    path = folder / RUN_ID_FILE
    known = os.environ.get("WANDB_RUN_ID") or (path.read_text(encoding="utf-8").strip() if path.exists() else "")
    if not known:
        known = uuid.uuid4().hex[:8]
    path.write_text(known + "\n", encoding="utf-8")
    return known


class WandbSink:
    """Sends records to wandb, from a thread of its own.

    first_row   rows that earlier starts of this run have logged
    warn        called with one line when wandb has to be worked around

    Raises `UserError` when wandb is not installed, and nothing else: trouble with the service is a warning.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        project: str,
        entity: str | None,
        group: str | None,
        first_row: int,
        warn: Callable[[str], None],
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError('--report-to wandb needs: pip install "openlm-moe[wandb]"') from None
        self._wandb = wandb
        self._folder = folder
        self._warn = warn
        self._row = first_row
        self._exit_code = 0
        self._run: Any = None
        self._arguments = {
            "project": project,
            "entity": entity,
            "group": group,
            "name": name,
            "id": run_id(folder),
            "dir": str(folder),
            "resume": "allow",
            "settings": wandb.Settings(init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT, console="off"),
        }
        self._init_deadline = time.monotonic() + INIT_TIMEOUT + GRACE
        self._dead = False
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def config(self, values: dict[str, Any]) -> None:
        self._queue.put(("config", values))

    def log(self, record: dict[str, Any]) -> None:
        if not self._dead:
            self._queue.put(("row", record))

    def close(self, exit_code: int = 0) -> None:
        """Ends the run. Waits for uploads, at most FINISH_TIMEOUT, and before that for a start still under way."""
        self._exit_code = exit_code
        self._queue.put(None)
        starting = max(self._init_deadline - time.monotonic(), 0) if self._run is None else 0
        self._thread.join(starting + FINISH_TIMEOUT + 10)
        if self._thread.is_alive():
            command = f"wandb sync --include-online {self._folder / 'wandb'}/*run-*"
            self._warn(f"warning: wandb is still busy; send what is missing with: {command}")

    def _work(self) -> None:
        self._run = self._start()
        if self._run is None:
            self._dead = True
            return
        failed = False
        for kind, values in iter(self._queue.get, None):
            try:
                if kind == "config":
                    self._run.config.update(values, allow_val_change=True)
                else:
                    self._run.log(self._row_values(values), step=self._row)
                    self._row += 1
            except Exception as error:
                if not failed:
                    failed = True
                    self._warn(
                        f"warning: wandb does not take metrics ({_one_line(error)}); training goes on without it"
                    )
        self._run.finish(exit_code=self._exit_code)

    def _start(self) -> Any:
        """A run: online if the service answers, else offline; None if even that fails."""
        mode = self._wandb.setup().settings.mode
        try:
            if mode in ("online", "shared") and not self._wandb.login(verify=False, prompt=False):
                raise PermissionError("no API key; `wandb login` stores one")
            return self._init(mode)
        except Exception as error:
            self._warn(
                f"warning: wandb is not reachable ({_one_line(error)}); the run is recorded offline, "
                f"send it later with: wandb sync {self._folder / 'wandb'}/offline-run-*"
            )
        try:
            self._wandb.teardown()  # wandb's own process still holds the run's id after a failed start
            return self._init("offline")
        except Exception as error:
            self._warn(f"warning: wandb does not start ({_one_line(error)}); training goes on without it")
            return None

    def _init(self, mode: str) -> Any:
        run = self._wandb.init(mode=mode, **self._arguments)
        run.define_metric(metrics.TOKENS)
        run.define_metric("*", step_metric=metrics.TOKENS)
        self._row = max(self._row, run.step)
        return run

    def _row_values(self, record: dict[str, Any]) -> dict[str, Any]:
        """`record` with its lists, which are loads per expert, as histograms, one bin an expert: drawn as heat maps."""

        def histogram(load: list[float]) -> Any:
            return self._wandb.Histogram(np_histogram=(load, list(range(len(load) + 1))))

        return {name: histogram(value) if isinstance(value, list) else value for name, value in record.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
