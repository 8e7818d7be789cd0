"""--averagers: averages of the weights along the training trajectory, under open_lm's names.

    poly_ETA_EVERY    update t weighs (ETA + 1) / (ETA + t): polynomial decay averaging (arXiv 1212.1824, eq. 10)
    ema_GAMMA_EVERY   average = GAMMA * average + (1 - GAMMA) * weights

An average is updated every EVERY steps (1 unless given) and is sharded as the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from openlm_moe import UserError

_DEFAULTS = {"poly": 0.0, "ema": 0.99}


class Averager:
    """One average of `model`'s parameters. `weights` is a module with the model's parameter names, for checkpoints."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.kind, self.parameter, self.every = parse_averager(name)
        self.model = model
        self.weights = _copy_of(model)
        self.steps = 0
        self.updates = 0

    @torch.no_grad()
    def step(self) -> None:
        """To be called after each optimizer step."""
        self.steps += 1
        if self.steps % self.every:
            return
        self.updates += 1
        if self.kind == "poly":
            new = (self.parameter + 1) / (self.parameter + self.updates)
        else:
            new = 1 - self.parameter
        for average, weight in zip(self.weights.parameters(), self.model.parameters(), strict=True):
            average.mul_(1 - new).add_(weight, alpha=new)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the average inside, and with its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(self.weights.parameters(), self.model.parameters(), strict=True):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # gathered copies of the other weights must not be used
                module.reshard()

    def state_dict(self) -> dict[str, int]:
        """Counters; `weights` are saved as a model."""
        return {"steps": self.steps, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.updates = state["steps"], state["updates"]


def parse_averager(name: str) -> tuple[str, float, int]:
    """'ema_0.999_10' -> ('ema', 0.999, 10). Raises `UserError` for a name that is not of this form."""
    kind, *rest = name.split("_")
    try:
        if kind not in _DEFAULTS or len(rest) > 2:
            raise ValueError
        parameter = float(rest[0]) if rest else _DEFAULTS[kind]
        every = int(rest[1]) if len(rest) > 1 else 1
        if every < 1 or parameter < 0 or (kind == "ema" and parameter > 1):
            raise ValueError
    except ValueError:
        raise UserError(
            f"--averagers names {name!r}; an averager is poly_ETA_EVERY or ema_GAMMA_EVERY, such as ema_0.999_10"
        ) from None
    return kind, parameter, every


def parse_averagers(names: str | None) -> list[str]:
    """The averagers in a comma-separated list, each once; open_lm's `none` means no average. Raises `UserError`."""
    wanted = [name for name in (names or "").split(",") if name not in ("", "none")]
    for name in wanted:
        parse_averager(name)
    return list(dict.fromkeys(wanted))


def make_averagers(names: str | None, model: nn.Module) -> list[Averager]:
    """One for each of the comma-separated `names`."""
    return [Averager(name, model) for name in parse_averagers(names)]


def _copy_of(model: nn.Module) -> nn.Module:
    """Bare modules that hold copies of `model`'s parameters, under the same names and with the same sharding.

    Buffers are not averaged: they are the model's own.
    """
    root = nn.Module()
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in copies:
            copies[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        module, leaf = _at(root, name)
        module.register_parameter(leaf, copies[parameter])
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            module, leaf = _at(root, name)
            module.register_buffer(leaf, buffer)
    return root


def _at(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds `name`, made where it is missing, and the last part of `name`."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root, leaf
