"""A check, by one tiny step, that no plan of sharding can be silently wrong, or hang, with MoE layers in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from openlm_moe.errors import UserError
from openlm_moe.layers.base import MoELayer, clean_name, moe_layers
from openlm_moe.layers.dispatch import AllToAllDispatcher
from openlm_moe.parallel.units import tied_parameters

_ALL_TO_ALL = ("alltoall", "all_to_all")
_OPEN = ("FORWARD", "PRE_BACKWARD")


class PlanError(UserError):
    """The sharding of a model is wrong. The message names the module, and what to change."""


def check_plan(model: nn.Module, forward: Callable[[nn.Module], Tensor] | None = None) -> None:
    """Raises `PlanError` if the model's layout is wrong. All ranks call it together; gradients must be empty.

    Runs one forward and backward and leaves no gradient and no change of random state behind. Refused are:

    - an all-to-all while any unit is open, in forward or backward (only a root without parameters may be; a root that
      holds tied parameters and nothing else is allowed, since they have no other place)
    - an expert weight that is sharded over ranks which do not hold the same experts
    - a router that computes in less than fp32
    - a parameter in no unit or in two

    forward: `model -> tensor`, for models that do not take tokens (1, 8) int64, which is what they get otherwise.
    """
    units = list(_units(model))
    if units:
        _check_membership(model, units)
    for name, layer in moe_layers(model):
        _check_experts(name, layer)
    faults = _run(model, units, forward or _tiny_forward)
    if faults:
        raise PlanError(faults[0])


class _Unit:
    """One FSDP state: the modules that it gathers together, and its parameter groups."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.names: list[str] = []

    @property
    def groups(self) -> list[Any]:
        if hasattr(self.state, "_fsdp_param_groups"):
            return self.state._fsdp_param_groups
        only = self.state._fsdp_param_group  # torch before 2.12
        return [] if only is None else [only]

    @property
    def is_open(self) -> bool:
        """Between the forward's (or backward's) start in the unit and its end there."""
        return any(group._training_state.name in _OPEN for group in self.groups)

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            for parameter in group.fsdp_params:
                yield parameter.sharded_param

    def __str__(self) -> str:
        return " + ".join(name or "the root" for name in self.names)


def _units(model: nn.Module) -> Iterator[_Unit]:
    found: dict[int, _Unit] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            unit = found.setdefault(id(state), _Unit(state))
            unit.names.append(clean_name(name))
    yield from (unit for unit in found.values() if unit.groups)


def _check_membership(model: nn.Module, units: list[_Unit]) -> None:
    holders: dict[nn.Parameter, list[_Unit]] = {}
    for unit in units:
        for parameter in unit.parameters():
            holders.setdefault(parameter, []).append(unit)
    for name, parameter in model.named_parameters():
        found = holders.get(parameter, [])
        if not found:
            raise PlanError(
                f"parameter {clean_name(name)} is in no sharded unit, so that its gradient would differ between ranks; "
                "wrap its module before the root"
            )
        if len(found) > 1:
            raise PlanError(f"parameter {clean_name(name)} is in two sharded units: {found[0]} and {found[1]}")


def _check_experts(name: str, layer: MoELayer) -> None:
    """Whether each rank holds the experts that the dispatcher sends it tokens for."""
    spread = isinstance(layer.dispatcher, AllToAllDispatcher)
    for key, weight in layer.experts.named_parameters(recurse=False):
        where = f"{name}.experts.{key}"
        if weight.shape[0] != layer.config.num_experts:
            raise PlanError(
                f"{where} stands for {weight.shape[0]} of {layer.config.num_experts} experts: it was cut up by hand "
                "and then sharded over ranks that hold other experts; split it with apply_expert_parallel instead"
            )
        if not spread:
            continue
        wanted = dist.get_process_group_ranks(layer.dispatcher.group)
        if not isinstance(weight, DTensor) or not _split_by_experts(weight, wanted):
            raise PlanError(
                f"{where} is not split over the ranks {wanted} that the layer sends its tokens to; "
                "call apply_expert_parallel before sharding"
            )


def _split_by_experts(weight: DTensor, ranks: list[int]) -> bool:
    """Whether one mesh dimension covers exactly `ranks` and splits the experts, and is the innermost to do so."""
    mesh = weight.device_mesh
    return any(
        weight.placements[dim] == Shard(0) and dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
        for dim in range(mesh.ndim)
    )


class _Watch(TorchDispatchMode):
    """Notes the units that are open when an all-to-all is issued."""

    def __init__(self, units: list[_Unit], faults: list[str]) -> None:
        super().__init__()
        self.units, self.faults, self.seen = units, faults, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in func.name() for part in _ALL_TO_ALL):
            self.seen += 1
            when = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            for unit in self.units:
                if unit.is_open:
                    self.faults.append(
                        f"an all-to-all runs in {when} while the sharded unit of {unit} is open; make its parts units "
                        "of their own (apply_fsdp with group_parts=False), so that the all-to-alls lie between them"
                    )
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, units: list[_Unit], forward: Callable[[nn.Module], Tensor]) -> list[str]:
    """Faults of one forward and backward. They are collected, not raised, so that no rank leaves the others waiting."""
    faults: list[str] = []
    tied = tied_parameters(model)
    watched = [unit for unit in units if not (unit.names == [""] and set(unit.parameters()) <= tied)]
    watch = _Watch(watched, faults)
    layers = moe_layers(model)
    modes = {module: module.training for module in model.modules()}
    with _watch_routers(layers, faults), _kept_random_state(model), watch, torch.enable_grad():
        model.train()
        try:
            forward(model).float().sum().backward()
        except ValueError as error:
            if "shared with a parameter" not in str(error):  # FSDP's own words, before any communication
                raise
            raise PlanError(f"{error} (a parameter is in two units)") from error
        finally:
            for module, training in modes.items():
                module.training = training
    model.zero_grad(set_to_none=True)
    spread = [name for name, layer in layers if isinstance(layer.dispatcher, AllToAllDispatcher)]
    if spread and watch.seen == 0:
        faults.append(
            f"no all-to-all was seen, though {spread[0]} is expert parallel: the model did not run its layers"
        )
    return faults


def _tiny_forward(model: nn.Module) -> Tensor:
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))
    return model(torch.zeros(1, 8, dtype=torch.int64, device=device))


@contextmanager
def _watch_routers(layers: list[tuple[str, MoELayer]], faults: list[str]) -> Iterator[None]:
    def note(name: str, values: Iterable[Tensor]) -> None:
        dtypes = {value.dtype for value in values if value.is_floating_point()}
        low = [str(dtype).removeprefix("torch.") for dtype in dtypes if torch.finfo(dtype).bits < 32]
        if low:
            faults.append(
                f"{name}.router computes in {low[0]}, where near-ties go to other experts; "
                "give its unit a mixed-precision policy with param_dtype=torch.float32"
            )

    handles = []
    for name, layer in layers:
        # Weights are looked at before the forward, when they are gathered in the dtype that is computed with.
        handles += [
            layer.router.register_forward_pre_hook(lambda module, args, name=name: note(name, module.parameters())),
            layer.router.register_forward_hook(lambda module, args, routing, name=name: note(name, routing)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _kept_random_state(model: nn.Module) -> Iterator[None]:
    on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        yield
