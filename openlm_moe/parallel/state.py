"""A model's and its optimizer's state under names and shapes that do not depend on how they are laid out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from openlm_moe.errors import UserError

# How an optimizer computes, not what: these stay as the running program chose them.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def get_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """`{"model": ..., "optim": ...}` by fully qualified names; tensors are the live ones, sharded as they are."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        untouched = not optimizer.state
        state["optim"] = get_optimizer_state_dict(model, optimizer)
        if untouched:
            # torch fills an empty state by a step with zero gradients, which counts as a step: take it back.
            for values in state["optim"]["state"].values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
    return state


def set_state(state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None) -> None:
    """Inverse of `get_state`."""
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        kept = [{k: group[k] for k in _IMPLEMENTATION if k in group} for group in optimizer.param_groups]
        set_optimizer_state_dict(model, optimizer, state["optim"])
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)


def copy_to_host(state: Any) -> Any:
    """A copy of nested dicts and lists whose tensors are on the host and share no memory with the original's."""
    if isinstance(state, dict):
        return {key: copy_to_host(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copy_to_host(value) for value in state)
    if isinstance(state, torch.Tensor):
        value = state.detach()
        return value.clone() if value.device.type == "cpu" else value.to("cpu")
    return state


def check_fit(index: Metadata, state: dict[str, Any], where: str) -> None:
    """Raises `UserError`, naming the first tensor, if a checkpoint's model is not the model of `state`."""
    prefix = "model."
    saved = {
        name[len(prefix) :]: tuple(entry.size)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(value.shape) for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    advice = "resume with the model settings that it was saved with, or train under another --name"
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            raise UserError(f"{where} does not fit this model: it has no {name}; {advice}")
        if name not in wanted:
            raise UserError(f"{where} does not fit this model: it has {name}, the model has not; {advice}")
        if saved[name] != wanted[name]:
            raise UserError(
                f"{where} does not fit this model: {name} is {saved[name]} there and {wanted[name]} here; {advice}"
            )
    if "optim" in state:
        steps = {name for name in index.state_dict_metadata if name.startswith("optim.state.")}
        for name, values in state["optim"]["state"].items():
            missing = [key for key in values if f"optim.state.{name}.{key}" not in steps]
            if missing:
                raise UserError(
                    f"{where} holds no optimizer state {missing[0]} of {name}; it was saved by another optimizer"
                )


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective for a DTensor)."""
    return value.full_tensor() if isinstance(value, DTensor) else value
