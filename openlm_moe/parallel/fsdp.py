"""FSDP2 for models with MoE layers: which parameters are gathered together, and when.

No all-to-all may run while a sharded unit is open: ranks would wait for each other in two groups at once, and
parameters would stay gathered for as long as the slowest rank's tokens take. So in a block with a MoE layer the parts
are the units:

    attention and norms   one unit over all ranks (a list: it opens before the first and closes after the last)
    router                one unit over all ranks, fp32, kept gathered until backward
    experts               one unit over the ranks that hold the same experts; the all-to-alls are outside of it
    shared experts        one unit over all ranks

A block without a MoE layer is one unit, and so are embedding, final norm and head. The root owns no parameter.

Gradients are summed, not averaged: a loss is divided by the step's global token count before backward, which is right
for experts too, whose gradients arrive from all ranks' tokens whatever the size of their mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from openlm_moe.errors import UserError
from openlm_moe.layers.base import MoELayer
from openlm_moe.layers.dispatch import AllToAllDispatcher
from openlm_moe.parallel.mesh import Layout
from openlm_moe.parallel.units import Unit, plan_units

PRECISIONS = ("fp32", "amp", "pure_bf16")


def parallelize(model: nn.Module, layout: Layout, **options: Any) -> nn.Module:
    """Spreads `model` over the ranks of `layout`, in place; returns it. `options` are those of `apply_fsdp`.

    Experts are split over the ep ranks, then everything is sharded (FSDP) or replicated. In a single process without a
    process group nothing changes. A model on the meta device stays there: see `materialise`.
    """
    if layout.dense_mesh is None:
        return model
    apply_expert_parallel(model, layout)
    return apply_fsdp(model, layout, **options)


def apply_expert_parallel(model: nn.Module, layout: Layout) -> nn.Module:
    """Splits the experts of all MoE layers over `layout.ep_mesh`: dim 0 of their weights becomes DTensor Shard(0)."""
    mesh = layout.ep_mesh
    if mesh is None:
        return model
    for layer in moe_modules(model):
        layer.dispatcher = AllToAllDispatcher(mesh.get_group())
        for name, weight in list(layer.experts.named_parameters(recurse=False)):
            if weight.shape[0] % mesh.size():
                raise UserError(f"{weight.shape[0]} experts cannot be split over {mesh.size()} expert-parallel ranks")
            local = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            whole = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
            )
            setattr(layer.experts, name, nn.Parameter(whole, requires_grad=weight.requires_grad))
    return model


def apply_fsdp(
    model: nn.Module,
    layout: Layout,
    *,
    precision: str = "fp32",
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    blocks: Iterable[nn.Module] | None = None,
    group_parts: bool = True,
) -> nn.Module:
    """Makes the units described at the top of this file, in place; returns `model`.

    precision: "fp32" (the parameters' own dtype), "amp" (bf16 parameters in computation, gradients reduced in fp32) or
        "pure_bf16" (both bf16). Master weights keep their dtype in all of them, and routers compute in fp32.
    reshard_after_forward: False keeps parameters gathered between forward and backward.
    blocks: the modules that repeat. Found where not given: the elements of the `nn.ModuleList` that holds MoE layers.

    group_parts: False makes each part of a block with a MoE layer a unit of its own; needed where a part runs after the
        layer. `check_plan` finds out.

    Works on any model that contains our MoE layers: layers are found by class. Raises `UserError` when a module that
    encloses a MoE layer owns parameters directly, since then no unit can hold them without spanning the all-to-all.
    """
    if precision not in PRECISIONS:
        raise UserError(f"FSDP precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    options = _Options(layout, precision, cpu_offload, reshard_after_forward)
    for unit in plan_units(model, None if blocks is None else list(blocks), group_parts):
        _shard(unit, options)
    root_policy = MixedPrecisionPolicy(output_dtype=None if precision == "fp32" else torch.float32)
    fully_shard(model, mesh=layout.dense_mesh, mp_policy=root_policy, offload_policy=options.offload)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for layer in moe_modules(model):
        _gather_experts_early(layer)
    model.register_forward_hook(_reshard_without_grad)
    return model


class _Options:
    def __init__(self, layout: Layout, precision: str, cpu_offload: bool, reshard: bool) -> None:
        bf16, fp32 = torch.bfloat16, torch.float32
        self.dense_mesh, self.expert_mesh = layout.dense_mesh, layout.expert_mesh
        self.reshard = reshard
        pin = layout.device.type != "cpu"
        self.offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
        self.dense = self.router = self.experts = MixedPrecisionPolicy()
        if precision != "fp32":
            reduce = fp32 if precision == "amp" else bf16
            self.dense = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=reduce)
            self.router = MixedPrecisionPolicy(param_dtype=fp32, reduce_dtype=fp32)
            # The experts cast their rows themselves; combine weights must stay fp32.
            self.experts = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=reduce, cast_forward_inputs=False)


def _shard(unit: Unit, options: _Options) -> None:
    keywords: dict[str, Any] = {
        "mesh": options.dense_mesh,
        "mp_policy": options.dense,
        "offload_policy": options.offload,
        "reshard_after_forward": options.reshard and not unit.keep_gathered,
    }
    if unit.kind == "router":
        keywords["mp_policy"] = options.router
    if unit.kind == "experts":
        keywords.update(mesh=options.expert_mesh, mp_policy=options.experts)
        keywords["shard_placement_fn"] = expert_placement(options.expert_mesh)
    fully_shard(unit.modules[0] if len(unit.modules) == 1 else unit.modules, **keywords)
    if unit.kind == "embedding":
        unit.modules[0].set_unshard_in_backward(False)  # its backward does not read the weight


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Along which dimension a stacked expert weight is sharded over `mesh`.

    By experts where they come out even; where there are fewer than ranks (or they do not divide), by the first later
    dimension that divides, since padding dim 0 would cost up to a whole expert a rank.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def place(weight: nn.Parameter) -> Shard | None:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        even = [dim for dim, size in enumerate(local.shape) if size % ranks == 0]
        return Shard(even[0]) if even else None

    return place


def _gather_experts_early(layer: MoELayer) -> None:
    """Starts the experts' all-gather before the all-to-all that precedes their use: forward, recompute and backward."""
    experts = layer.experts
    if not (isinstance(layer.router, FSDPModule) and isinstance(experts, FSDPModule)):
        return
    layer.router.set_modules_to_forward_prefetch([experts])

    def on_gradient(grad: Tensor) -> None:
        experts.unshard(async_op=True)  # nothing happens if FSDP's own prefetching was here first

    def on_output(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad and any(weight.requires_grad for weight in experts.parameters()):
            out.register_hook(on_gradient)

    layer.register_forward_hook(on_output)


def _reshard_without_grad(module: nn.Module, args: Any, out: Any) -> None:
    """After a forward without gradient no backward comes to free what is gathered, and it would go stale."""
    if not torch.is_grad_enabled():
        for unit in fsdp_modules(module):
            unit.reshard()


@contextmanager
def gradient_sync(model: nn.Module, last: bool) -> Iterator[None]:
    """Put around forward and backward of a micro-batch: gradients are reduced over ranks only when it is the `last`.

    Saves communication, at the price of holding whole gradients until then.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)


def materialise(model: nn.Module, layout: Layout, seed: int, cpu_offload: bool = False) -> nn.Module:
    """Gives a model on the meta device storage for this rank's shards, on its own device, and fills just those.

    `model.init_weights(seed)` does the filling; it must cope with DTensors (see `openlm_moe.layers.init.local_part`),
    as MoE layers and the built-in model do. Values are those of a one-process build, bitwise.
    """
    model.to_empty(device=torch.device("cpu") if cpu_offload else layout.device)
    if cpu_offload:  # of parameters: what is computed with directly has to be where the computation is
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(layout.device)
    model.init_weights(seed)
    return model


def moe_modules(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
