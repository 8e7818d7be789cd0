"""open_lm's epoch_N.pt (and optimizer_N.pt) to a sharded checkpoint that any number of ranks can load.

On the CPU, in one process; tensors are mapped from the file and written one by one. The result holds the weights for
--pretrained; a file that `dcp-to-pt` wrote also holds what --resume needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from openlm_moe.convert.open_lm_format import OUR_STATE, load_pt, model_tensors
from openlm_moe.errors import UserError
from openlm_moe.parallel.checkpoint import Checkpointer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=Path, help="epoch_N.pt")
    parser.add_argument("output", type=Path, help="folder in which the step_ folder is made")
    parser.add_argument("--optimizer", type=Path, help="optimizer_N.pt, saved under FSDP or by dcp-to-pt")


def run(arguments: argparse.Namespace) -> None:
    """Converts, and says what was written."""
    checkpoint = load_pt(arguments.weights)
    tensors: dict[str, Any] = {"model": model_tensors(checkpoint)}
    if arguments.optimizer is not None:
        tensors["optim"] = optimizer_state(load_pt(arguments.optimizer), set(tensors["model"]), arguments.optimizer)
    state = checkpoint.get(OUR_STATE) or _plain_state(checkpoint)
    writer = Checkpointer(arguments.output, asynchronous=False)
    path = writer.write(int(state["step"]), tensors, state)
    writer.close()
    print(f"{path}: {len(tensors['model'])} tensors")


def optimizer_state(loaded: dict[str, Any], names: set[str], path: Path) -> dict[str, Any]:
    """The optimizer's state by parameter names. Raises `UserError` where the file numbers its parameters instead."""
    optimizer = loaded.get("optimizer")
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        raise UserError(f"{path} holds no optimizer state; leave --optimizer away to convert the weights alone")
    strangers = [name for name in optimizer["state"] if name not in names]
    if strangers:
        raise UserError(
            f"{path} has state of {strangers[0]!r}, which is no parameter of the weights (files saved without FSDP "
            "number their parameters); leave --optimizer away to convert the weights alone"
        )
    return optimizer


def _plain_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": int(checkpoint.get("step") or 0),
        "epoch": int(checkpoint.get("epoch") or 0),
        "name": str(checkpoint.get("name", "")),
    }
