"""open_lm's checkpoint files: epoch_N.pt (weights) and optimizer_N.pt, read without running anything they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openlm_moe.errors import UserError, writing
from openlm_moe.parallel.safe_reader import why_refused

# Where open_lm's files have nothing to say, ours goes along: the JSON state of a sharded checkpoint.
OUR_STATE = "openlm_moe"

_WRAPPERS = re.compile(r"^module\.|_orig_mod\.")
_ROTARY = re.compile(r"layers\.\d+\.attention\.pos_embed\.inv_freq")


def load_pt(path: Path | str) -> dict[str, Any]:
    """The dict in a .pt file, its tensors mapped from disk. Only tensors and plain values are admitted.

    Raises `UserError` for a file that is missing, damaged, or holds anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; name an epoch_N.pt or optimizer_N.pt")
    try:
        with torch.serialization.safe_globals(_numpy_numbers()):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling what is damaged may raise anything
        raise UserError(f"{path} cannot be read as tensors and plain values: {why_refused(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not open_lm's dict")
    return loaded


def save_pt(content: dict[str, Any], path: Path) -> None:
    """Writes `content` to `path`, whole or not at all. Raises `UserError`."""
    aside = path.with_name(f".writing-{path.name}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, aside)
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _numpy_numbers() -> list[Any]:
    """Numpy's scalars, which open_lm's metrics and optimizer settings may be."""
    try:
        import numpy as np
    except ImportError:
        return []
    scalar = np.float64(0).__reduce__()[0]
    kinds = [type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")]
    # Files name numpy 1's module where they are older.
    return [scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *kinds]


def model_tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Weights by their plain names: without wrappers' prefixes and without rotary tables, which are computed."""
    state = checkpoint.get("state_dict", checkpoint)
    if not isinstance(state, dict):
        raise UserError(f"the file's state_dict is a {type(state).__name__}, not a dict of weights; name an epoch_N.pt")
    tensors = {_WRAPPERS.sub("", name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError("the file holds no weights: it has neither state_dict nor tensors; name an epoch_N.pt")
    return {name: value for name, value in tensors.items() if not _ROTARY.fullmatch(name)}


def rotary_tables(model: dict[str, Any]) -> dict[str, Tensor]:
    """The buffers that open_lm's rotary attention saves beside its weights; `model` is the JSON of a model's shape."""
    if model["positional_embedding_type"] not in ("rotary", "head_rotary"):
        return {}
    head_dim = model["hidden_dim"] // model["n_heads"]
    table = 1.0 / (model.get("rope_theta", 10000.0) ** (torch.arange(0, head_dim, 2).float() / head_dim))
    return {f"layers.{i}.attention.pos_embed.inv_freq": table.clone() for i in range(model["n_layers"])}
