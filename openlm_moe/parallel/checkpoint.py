"""Checkpoints that survive being killed, and that any number of ranks can resume.

    <folder>/step_0000100/      torch.distributed.checkpoint files, state.json, and COMPLETE, which is written last
    <folder>/.writing-...       a save under way; if it is not finished, the next run's first save removes it

COMPLETE lists every file's size and checksum, so that a torn or altered checkpoint is noticed before it is used:
whatever reads one goes through `Checkpointer.load` or `read_checked_index`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from openlm_moe.errors import UserError, writing
from openlm_moe.parallel.ranks import ToldElsewhere
from openlm_moe.parallel.safe_reader import read_index, read_tensors
from openlm_moe.parallel.state import check_fit, copy_to_host, get_state, set_state

MARKER = "COMPLETE"
STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")
log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads checkpoints in `folder`. Every rank makes one and calls its methods together with the others.

    keep_last: how many complete checkpoints stay, of the step just saved and those before it; None keeps all.
    asynchronous: `save` returns as soon as the state is copied to the host, and a thread writes it. Call `close` (or
        `wait`) before the process group ends. An error of that thread is raised by the next call: a `UserError` where
        the checkpoint could not be written.
    """

    def __init__(
        self,
        folder: Path | str,
        keep_last: int | None = None,
        asynchronous: bool = True,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise UserError(f"--keep-last is {keep_last}; it must be 1 or more")
        self.folder = Path(folder)
        self.keep_last, self.asynchronous = keep_last, asynchronous
        # A gloo group of its own: the writing thread's messages must not meet those of the training step.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._cleaned = False
        self._undamaged: Path | None = None  # what `latest` found to be so
        atexit.register(self._thread.shutdown)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any]) -> Path:
        """Saves weights, optimizer state and `state` (JSON values) as the checkpoint of `step`; returns its folder.

        `read_state` gives `state` back, with `step`.
        """
        self.wait()  # before the state is looked at, so that an earlier failure costs no copy
        return self.write(step, get_state(model, optimizer), state)

    def write(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], planner: SavePlanner | None = None
    ) -> Path:
        """As `save`, of tensors laid out as `state.get_state` gives them.

        planner: makes the tensors when they are written; `tensors` may be on the meta device then. Not `asynchronous`.
        """
        self.wait()
        if not self._cleaned:  # not earlier: who only reads may share the folder with a run that is saving
            self._on_main(self._clean)
            self._cleaned = True
        text = json.dumps({**state, "step": step})
        path = self.folder / f"step_{step:07d}"
        if self.asynchronous:
            self._pending = self._thread.submit(self._write, path, copy_to_host(tensors), text)
        else:
            self._write(path, tensors, text, planner)
        return path

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes the last save. To be called before the process group ends."""
        self.wait()
        self._thread.shutdown()

    def latest(self) -> Path | None:
        """The newest checkpoint that is complete and undamaged, the same on every rank; None if there is none."""
        self.wait()
        self._on_main(self._put_back)
        names = self._from_main(lambda: [path.name for path in complete_checkpoints(self.folder)])
        for name in reversed(names):
            path = self.folder / name
            fault = self._fault(path)
            if fault is None:
                self._undamaged = path
                return path
            if self._rank == 0:
                log.warning("skipping checkpoint %s: %s", path, fault)
        return None

    def load(self, path: Path | str, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """Loads weights and optimizer state in place, from whatever layout they were saved in; returns the JSON state.

        Raises `UserError` if the checkpoint is damaged, or of another model or optimizer.
        """
        self.wait()
        path = Path(path)
        require_complete(path)
        if path != self._undamaged:
            refuse_damaged(path, self._fault(path))
        state = get_state(model, optimizer)
        check_fit(read_index(path), state, f"checkpoint {path}")
        read_tensors(state, path, self._group)
        set_state(state, model, optimizer)
        return read_state(path)

    def _write(self, path: Path, tensors: dict[str, Any], state: str, planner: SavePlanner | None = None) -> None:
        aside = path.with_name(f".writing-{path.name}")
        try:
            with writing(path):
                self._write_aside(aside, path, tensors, state, planner)
        except Exception as error:
            if self._rank == 0:  # on a full disk it would be in the way of everything that comes after
                shutil.rmtree(aside, ignore_errors=True)
            elif isinstance(error, UserError):
                raise ToldElsewhere(str(error)) from error
            raise

    def _write_aside(
        self, aside: Path, path: Path, tensors: dict[str, Any], state: str, planner: SavePlanner | None
    ) -> None:
        self._on_main(lambda: _empty_folder(aside))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(
                    tensors,
                    # torch holds the tensors of a file until it is written; a planner's are to come one by one
                    storage_writer=dcp.FileSystemWriter(aside, single_file_per_rank=planner is None),
                    planner=planner,
                    process_group=self._group,
                )
        except CheckpointException as error:  # not an Exception: nobody would expect it
            raise next(iter(error.failures.values()))[0] from error
        sums = self._all(lambda: {name: _checksum(aside / name) for name in self._share(sorted(os.listdir(aside)))})
        files = {name: entry for part in sums for name, entry in part.items()}
        self._on_main(lambda: self._finish(aside, path, state, files))

    def _finish(self, aside: Path, path: Path, state: str, files: dict[str, Any]) -> None:
        _write_durably(aside / STATE, state)
        files = {**files, STATE: _checksum(aside / STATE)}
        _write_durably(aside / MARKER, json.dumps({"files": files}, indent=1))
        replaced = path.with_name(f".replaced-{path.name}")
        if path.exists():
            path.rename(replaced)
        aside.rename(path)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if self.keep_last is not None:
            # Later steps than this are of a history that was left, or damaged: they count for nothing here.
            history = [p for p in complete_checkpoints(self.folder) if _step(p) <= _step(path)]
            for old in history[: -self.keep_last]:
                # The marker goes first: a half-removed checkpoint must not look complete.
                (old / MARKER).unlink()
                shutil.rmtree(old)

    def _clean(self) -> None:
        """Removes what saves that were killed have left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._put_back()
        for left in [*self.folder.glob(".writing-*"), *self.folder.glob(".replaced-*")]:
            shutil.rmtree(left)

    def _put_back(self) -> None:
        """Undoes the first rename of a `_finish` that was killed before its second."""
        for replaced in self.folder.glob(".replaced-*"):
            original = replaced.with_name(replaced.name.removeprefix(".replaced-"))
            if not original.exists():
                replaced.rename(original)

    def _fault(self, path: Path) -> str | None:
        """What is wrong with the checkpoint at `path`, in words; the ranks share its files among them."""
        return next(filter(None, self._all(lambda: find_fault(path, self._share))), None)

    def _share(self, names: list[str]) -> list[str]:
        return names[self._rank :: self._world]

    def _all(self, function: Callable[[], Any]) -> list[Any]:
        """Every rank's `function()`, on every rank. If it raises on any rank, all raise: none is left waiting."""
        try:
            mine: Any = (function(), None)
        except Exception as error:
            mine = (None, error)
        results = [mine]
        if self._world > 1:
            results = [None] * self._world
            dist.all_gather_object(results, mine, group=self._group)
        for _, error in results:
            if error is not None:
                raise error
        return [value for value, _ in results]

    def _from_main(self, function: Callable[[], Any]) -> Any:
        return self._all(lambda: function() if self._rank == 0 else None)[0]

    def _on_main(self, function: Callable[[], Any]) -> None:
        self._from_main(lambda: function() and None)


def complete_checkpoints(folder: Path | str) -> list[Path]:
    """Folders of the complete checkpoints in `folder`, oldest step first. Their contents are not verified."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return [path for path in sorted(found, key=_step) if (path / MARKER).exists()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def read_checked_index(path: Path) -> Any:
    """The checkpoint's index. Raises `UserError` if `path` is no complete checkpoint, damaged, or not safe to read."""
    require_complete(path)
    refuse_damaged(path, find_fault(path))
    return read_index(path)


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of the checkpoint at `path`: what was given to `save`, and `step`. Raises `UserError`."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error}; use another one") from None
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise UserError(f"checkpoint {path} cannot be read: its {STATE} names no step; use another one")
    return state


def require_complete(path: Path) -> None:
    """Raises `UserError` where there is no complete checkpoint at `path`."""
    if not (path / MARKER).exists():
        raise UserError(f"{path} is no complete checkpoint (it has no file {MARKER}); give a step_ folder that has one")


def refuse_damaged(path: Path, fault: str | None) -> None:
    if fault is not None:
        raise UserError(f"checkpoint {path} is damaged: {fault}; use an older one")


def find_fault(path: Path, share: Callable[[list[str]], list[str]] = list) -> str | None:
    """What is wrong with the `share` of the files of the checkpoint at `path`, in words."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        for name in share(sorted(files)):
            if not (path / name).exists():
                return f"{name} is missing"
            if _checksum(path / name) != files[name]:
                return f"{name} is not as it was written"
        read_index(path)
    except Exception as error:  # unpickling what is damaged may raise anything
        return f"it cannot be read ({error})"
    return None


def _checksum(path: Path) -> list[int]:
    """[bytes, CRC-32]: finds accidental damage, which is all it is for."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
