"""What a checkpoint holds beside weights and moments, when one replaces another, and where a run goes on from.

checkpoints/step_0000100/               weights, optimizer state, and `state_of` as JSON
averages/<averager>/step_0000100/       the same step's average, a checkpoint of weights alone
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openlm_moe import MoEConfig, UserError, __version__
from openlm_moe.hosts.builtin.architecture import Architecture, exported_to
from openlm_moe.hosts.builtin.averaging import Averager
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import Checkpointer
from openlm_moe.parallel.checkpoint import MARKER, complete_checkpoints, read_state
from openlm_moe.parallel.ranks import on_main

if TYPE_CHECKING:
    from openlm_moe.hosts.builtin.train import Run

CHECKPOINTS = "checkpoints"
AVERAGES = "averages"


class Saver:
    """Saves and restores a `Run`. Every rank makes one and calls it together with the others."""

    def __init__(self, folder: Path, args: argparse.Namespace, averagers: list[Averager]) -> None:
        self.checkpoints = Checkpointer(folder / CHECKPOINTS, args.keep_last)
        # One more than of the checkpoints: an average is saved first, while the previous checkpoint still counts.
        kept = None if args.keep_last is None else args.keep_last + 1
        self.averages = {a.name: Checkpointer(folder / AVERAGES / a.name, kept) for a in averagers}
        self.transient: Path | None = None

    def save(self, run: Run, transient: bool = False) -> None:
        """Saves the run as it is. The next save removes a `transient` checkpoint."""
        for averager in run.averagers:
            keeper = self.averages[averager.name]
            keeper.save(run.step, averager.weights, None, {**state_of(run), "averager": averager.name})
            keeper.wait()
        outdated = self.transient
        path = self.checkpoints.save(run.step, run.model, run.optimizer, {**state_of(run), "transient": transient})
        self.transient = path if transient else None
        if run.done or run.args.hf_save == "checkpoints":
            run.architecture.export(run.model, run.folder, run.step, run.args.keep_last)
        if outdated is not None and outdated != path:
            self.checkpoints.wait()
            on_main(lambda: remove(outdated))

    def latest(self) -> Path | None:
        """The newest undamaged checkpoint of this run."""
        return self.checkpoints.latest()

    def restore(self, run: Run, path: Path) -> None:
        """Puts the checkpoint at `path` into `run`: weights, moments, averages, counters, place in the data."""
        if "data" not in read_state(path):
            raise UserError(f"checkpoint {path} holds weights alone; begin with them: --pretrained, without --resume")
        state = self.checkpoints.load(path, run.model, run.optimizer)
        check_same_model(state, run.architecture, path)
        if state.get("transient") and path.parent == self.checkpoints.folder:
            self.transient = path
        samples = run.data.resume(state["data"], allow_change=run.args.allow_data_change)
        if samples % run.plan.global_batch_size:
            raise UserError(
                f"checkpoint {path} stands at sample {samples}, which is no multiple of the global batch size "
                f"{run.plan.global_batch_size}; resume with --global-batch-size {state['global_batch_size']}"
            )
        run.step = samples // run.plan.global_batch_size
        run.scale.load_state_dict(state["loss_scale"])
        for averager in run.averagers:
            if averager.name not in state["averagers"]:
                raise UserError(
                    f"checkpoint {path} has no average {averager.name}; it was saved without that --averagers"
                )
            home = path.parent.parent / AVERAGES / averager.name / path.name
            self.averages[averager.name].load(home, averager.weights, None)
            averager.load_state_dict(state["averagers"][averager.name])

    def load_weights(self, run: Run, path: Path) -> None:
        """Puts the weights of the checkpoint at `path` into `run`, and nothing else."""
        self.checkpoints.load(path, run.model, None)

    def resume_hint(self, run: Run) -> str:
        """How to go on from the last save."""
        return f"to go on, start the same command with --name {run.folder.name} --resume latest"

    def close(self) -> None:
        """Returns when everything is on disk."""
        for keeper in (*self.averages.values(), self.checkpoints):
            keeper.close()


def state_of(run: Run) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "version": __version__,
        "name": run.folder.name,
        "step": run.step,
        "tokens": run.tokens,
        "epoch": run.step * run.plan.global_batch_size // run.plan.samples_per_epoch,
        "seed": run.args.seed,
        "global_batch_size": run.plan.global_batch_size,
        "model": run.architecture.to_json(),
        "moe": run.architecture.moe.to_dict(),
        "data": run.data.state(run.step * run.plan.global_batch_size),
        "loss_scale": run.scale.state_dict(),
        "averagers": {averager.name: averager.state_dict() for averager in run.averagers},
        "evaluation": {e.name: e.loss for e in run.evaluations},
    }


# Settings that a run may change when it goes on: they shape the training, not the model.
_FREE = {"loss_weight", "z_loss_weight", "bias_update_rate", "balance_scope", "jitter", "backend", "capacity_factor"}


def check_same_model(state: dict[str, Any], architecture: Architecture, path: Path) -> None:
    """Raises `UserError`, naming the first setting, if the checkpoint's model is not that of the flags.

    Weights that were converted from another format come without settings; loading compares their names and shapes.
    """
    if "model" not in state:
        return
    pairs = [(key, state["model"].get(key), value) for key, value in architecture.to_json().items()]
    pairs += [(f"moe {k}", state["moe"].get(k), v) for k, v in architecture.moe.to_dict().items() if k not in _FREE]
    for key, saved, wanted in pairs:
        if saved != wanted:
            raise UserError(
                f"checkpoint {path} is of another architecture: its {key} is {saved}, this model's is {wanted}; "
                "give the settings it was saved with, or start a new run with --name"
            )


def model_of(state: dict[str, Any], checkpoint: Path) -> tuple[ModelParams, MoEConfig]:
    """The built-in model that the checkpoint is of, by its `read_state`. Raises `UserError` if it is of no such."""
    if "family" in state.get("model", {}):
        raise UserError(
            f"checkpoint {checkpoint} is of a Hugging Face model; give the folder that its run, trained by --hf-model, "
            f"wrote into {exported_to(checkpoint.parents[1], state['step']).parent}"
        )
    if "model" not in state or "moe" not in state:
        raise UserError(f"checkpoint {checkpoint} does not say what model it is of; only the trainer's own do")
    return ModelParams.from_json(state["model"]), MoEConfig.from_dict(state["moe"])


def find_checkpoint(given: str) -> Path:
    """The checkpoint that a path names: a step_ folder, or the newest in a run's folder. Raises `UserError`."""
    path = Path(given)
    if path.suffix == ".pt":
        raise UserError(f"{given} is open_lm's format; convert it first: python -m openlm_moe.convert pt-to-dcp")
    if not path.exists():
        raise UserError(f"checkpoint {given} does not exist")
    if (path / MARKER).exists():
        return path
    for folder in (path, path / CHECKPOINTS):
        if found := complete_checkpoints(folder):
            return found[-1]
    raise UserError(f"{given} holds no complete checkpoint; name a step_ folder, or a run's folder")


def remove(path: Path) -> None:
    """Deletes a checkpoint; it stops counting as one before its files go."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
