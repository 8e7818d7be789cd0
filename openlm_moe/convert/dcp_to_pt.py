"""A sharded checkpoint (a step_ folder) to open_lm's epoch_N.pt and optimizer_N.pt. On the CPU, in one process.

Memory: the file being written, and one shard of one tensor.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from openlm_moe.convert.open_lm_format import OUR_STATE, rotary_tables, save_pt
from openlm_moe.parallel.checkpoint import read_checked_index, read_state
from openlm_moe.parallel.safe_reader import read_tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="step_ folder of a run")
    parser.add_argument("output", type=Path, help="folder for epoch_N.pt and optimizer_N.pt")
    parser.add_argument("--no-optimizer", action="store_true", help="weights only")


def run(arguments: argparse.Namespace) -> None:
    """Converts, and says what was written."""
    index = read_checked_index(arguments.checkpoint)
    state = read_state(arguments.checkpoint)
    arguments.output.mkdir(parents=True, exist_ok=True)
    epoch = int(state.get("epoch", 0))
    common = {"epoch": epoch, "name": state.get("name", ""), "evaluation_metrics": _metrics(state)}

    weights = read_part(arguments.checkpoint, index, "model")
    count = len(weights)
    if "model" in state:
        weights |= rotary_tables(state["model"])
    more = {key: state[ours] for key, ours in (("step", "step"), ("shard_shuffle_seed", "seed")) if ours in state}
    _save({**common, **more, "state_dict": weights, OUR_STATE: state}, arguments.output / f"epoch_{epoch}.pt", count)
    del weights

    if not arguments.no_optimizer and any(name.startswith("optim.") for name in index.state_dict_metadata):
        optimizer = read_part(arguments.checkpoint, index, "optim")
        moments = sum(len(values) for values in optimizer["state"].values())
        _save({**common, "optimizer": optimizer}, arguments.output / f"optimizer_{epoch}.pt", moments)


def read_part(checkpoint: Path, index: Metadata, part: str) -> dict[str, Any]:
    """The nested values under `part` ("model" or "optim"), whole, on the CPU."""
    state: dict[str, Any] = {}
    for name, path in index.planner_data.items():
        if path[0] != part:
            continue
        entry = index.state_dict_metadata[name]
        tensor = isinstance(entry, TensorStorageMetadata)
        _put(state, path, torch.empty(entry.size, dtype=entry.properties.dtype) if tensor else None)
    read_tensors(state, checkpoint, alone=True)
    return state[part]


def _put(container: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Sets `container[path[0]][path[1]]... = value`, making dicts, and lists where the key that follows is a number."""
    for key, following in pairwise(path):
        container = _slot(container, key, [] if isinstance(following, int) else {})
    if isinstance(container, list):
        container.extend([None] * (path[-1] + 1 - len(container)))
    container[path[-1]] = value


def _slot(container: Any, key: str | int, fresh: Any) -> Any:
    if isinstance(container, list):
        container.extend({} for _ in range(key + 1 - len(container)))
        return container[key]
    return container.setdefault(key, fresh)


def _metrics(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"val_data": [name], "loss": loss} for name, loss in state.get("evaluation", {}).items()]


def _save(content: dict[str, Any], path: Path, tensors: int) -> None:
    save_pt(content, path)
    print(f"{path}: {tensors} tensors")
