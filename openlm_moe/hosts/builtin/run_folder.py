"""The run's folder: its name, that it may be used, and where a run goes on from. Nothing is written before `create`."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from openlm_moe import UserError
from openlm_moe.data.corpus import embedded_tokenizer
from openlm_moe.hosts.builtin.saving import CHECKPOINTS
from openlm_moe.parallel.checkpoint import complete_checkpoints
from openlm_moe.parallel.ranks import on_main
from openlm_moe.telemetry.console import LOG_FILE

PARAMS_FILE = "params.json"
STOP_FILE = "stop"  # asks the run under way to save and stop; see parallel/stop.py


def run_name(args: argparse.Namespace, per_rank_batch: int) -> str:
    """--name, or open_lm's: date, model, learning rate, batch size of a rank. The same on every rank."""
    if args.name is not None:
        if args.name in ("", ".", "..") or "/" in args.name:
            raise UserError(f"--name is {args.name!r}; it must be a plain folder name")
        return args.name
    date = on_main(lambda: time.strftime("%Y_%m_%d-%H_%M_%S"))
    model = Path(args.model).stem if args.hf_model is None else Path(args.hf_model).name
    return f"{date}-model_{model}-lr_{args.lr}-b_{per_rank_batch}"


def check_folder(folder: Path, resume: str | None) -> None:
    """Raises `UserError` if the run exists already and is not resumed, or if no folder could be made there."""
    if (folder / LOG_FILE).exists() and resume != "latest":
        raise UserError(
            f"experiment {folder} already exists; choose another --name, or go on with it by --resume latest"
        )
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"{place} is a file, so {folder} cannot be made; choose another --logs or --name")
            break
    _try_writing(place, folder)


def _try_writing(place: Path, folder: Path) -> None:
    probe = place / f".openlm_moe_{time.time_ns()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}); choose another --logs folder") from None


def create(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder and writes params.json into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PARAMS_FILE).write_text(json.dumps(settings, indent=2, default=str) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}); choose another --logs folder") from None


def embedded_tokenizer_of(run: Path) -> Path | None:
    """The embedded corpus's tokenizer.json if the run in this folder used it. Raises `UserError` if it differs here."""
    path = run / PARAMS_FILE
    record = json.loads(path.read_text()).get("corpus") if path.is_file() else None
    if not record:
        return None
    file = Path(embedded_tokenizer())
    if hashlib.sha256(file.read_bytes()).hexdigest() != record["tokenizer_sha256"]:
        raise UserError(f"the embedded corpus of this Python has another tokenizer than {run}; use that of the run")
    return file


def has_checkpoint(folder: Path) -> bool:
    """Whether the run in `folder` has anything to resume."""
    return bool(complete_checkpoints(folder / CHECKPOINTS))
