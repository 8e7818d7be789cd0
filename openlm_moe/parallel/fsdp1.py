"""FSDP1 (`FullyShardedDataParallel`) for models with MoE layers, for hosts that are built on it.

    fsdp1_expert_parallel(model, layout)                     # only for expert parallelism, before wrapping
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp1_wrap_policy(model),
        ignored_states=fsdp1_ignored_states(model),
        ...
    )
    fsdp1_clip_grad_norm_(model, max_norm)                   # instead of the model's own method

As with FSDP2, in a block with a MoE layer attention, router and experts are units of their own. FSDP1 has no units of
several modules, so the norms stay in the root's flat parameter, which is open all the time; it is small.

Under expert parallelism FSDP1 does not see the experts: it could only average their gradients over too few ranks. They
are plain parameters of this rank's share, and a hook on each averages its gradient over all ranks, as FSDP1 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from openlm_moe.layers.base import MoELayer, clean_name, moe_layers
from openlm_moe.layers.dispatch import AllToAllDispatcher
from openlm_moe.parallel.clip import clip_held_grads_
from openlm_moe.parallel.mesh import Layout
from openlm_moe.parallel.units import plan_units


def fsdp1_wrap_policy(model: nn.Module, blocks: list[nn.Module] | None = None) -> CustomPolicy:
    """The `auto_wrap_policy` for `model`. `blocks` as in `apply_fsdp`.

    Routers compute and are reduced in fp32 whatever the model's mixed precision.
    """
    full = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    kinds: dict[nn.Module, bool | dict[str, Any]] = {}
    ignored = set(fsdp1_ignored_states(model))
    for unit in plan_units(model, blocks):
        for module in unit.modules:
            parameters = list(module.parameters())
            if all(parameter in ignored for parameter in parameters):
                continue
            if unit.kind == "router" and all(parameter.dtype == torch.float32 for parameter in parameters):
                kinds[module] = {"mixed_precision": full}
            else:
                # In a list of several modules the norms are those with vectors alone; they go to the root.
                kinds[module] = len(unit.modules) == 1 or any(parameter.dim() > 1 for parameter in parameters)
    return CustomPolicy(lambda module: kinds.get(module, False))


def fsdp1_ignored_states(model: nn.Module) -> list[nn.Parameter]:
    """What FSDP1 must leave alone: the expert weights of expert-parallel layers."""
    return [weight for layer in _spread_layers(model) for weight in layer.experts.parameters()]


def fsdp1_expert_parallel(model: nn.Module, layout: Layout) -> nn.Module:
    """Splits the experts over `layout.ep_mesh` for FSDP1, in place; gradients come out averaged over all ranks.

    Ranks that hold the same experts must be told apart by `layout.expert_mesh`, which covers them.
    """
    if layout.ep_mesh is None:
        return model
    copies = _ranks_with_the_same_experts(layout)
    for _, layer in moe_layers(model):
        layer.dispatcher = AllToAllDispatcher(layout.ep_mesh.get_group())
        for name, weight in list(layer.experts.named_parameters(recurse=False)):
            part = weight.detach().chunk(layout.expert_parallel)[layout.ep_mesh.get_local_rank()].clone()
            local = nn.Parameter(part, requires_grad=weight.requires_grad)
            if local.requires_grad:
                local.register_hook(lambda grad: _averaged(grad, copies, layout.world_size))
            setattr(layer.experts, name, local)
    return model


def fsdp1_clip_grad_norm_(model: FullyShardedDataParallel, max_norm: float | None) -> Tensor:
    """As `clip_grad_norm_`: one norm over everything, the same on all ranks and equal to one process's.

    FSDP1's own method gives each rank another norm when experts are ignored.
    """
    world = dist.get_world_size()
    unsharded = model.sharding_strategy == ShardingStrategy.NO_SHARD
    copies = world if unsharded else world // model.process_group.size()
    ignored: dict[nn.Parameter, int] = {}
    for layer in _spread_layers(model):
        for weight in layer.experts.parameters():
            ignored[weight] = world // dist.get_world_size(layer.dispatcher.group)
    held = [(p.grad, ignored.get(p, copies)) for p in model.parameters() if p.grad is not None]
    return clip_held_grads_(held, max_norm)


def gather_experts(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every expert-parallel weight whole, for a full state dict. A collective; each rank gets it all."""
    return {**state, **{name: _gathered(layer, weight) for name, layer, weight in _spread_weights(model)}}


def scatter_experts(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `gather_experts`: `state` with this rank's part of each expert-parallel weight."""
    out = dict(state)
    for name, layer, _ in _spread_weights(model):
        group = layer.dispatcher.group
        out[name] = state[name].chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return out


def gather_expert_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`FSDP.optim_state_dict`'s result with the moments of every expert-parallel weight whole. A collective."""
    moments = {}
    for name, layer, weight in _spread_weights(model):
        own = optimizer.state[weight]
        moments[name] = {key: _gathered(layer, v) if v.shape == weight.shape else v for key, v in own.items()}
    return {**state, "state": {**state.get("state", {}), **moments}} if moments else state


def scatter_expert_moments(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `gather_expert_moments`, for `FSDP.optim_state_dict_to_load`."""
    moments = dict(state["state"])
    for name, layer, _ in _spread_weights(model):
        ranks, rank = dist.get_world_size(layer.dispatcher.group), dist.get_rank(layer.dispatcher.group)
        moments[name] = {k: v.chunk(ranks)[rank].clone() if v.dim() == 3 else v for k, v in moments[name].items()}
    return {**state, "state": moments}


def _spread_layers(model: nn.Module) -> list[MoELayer]:
    return [layer for _, layer in moe_layers(model) if isinstance(layer.dispatcher, AllToAllDispatcher)]


def _spread_weights(model: nn.Module) -> Iterator[tuple[str, MoELayer, nn.Parameter]]:
    spread = _spread_layers(model)
    for name, layer in moe_layers(model):
        if layer in spread:
            for key, weight in layer.experts.named_parameters(recurse=False):
                yield f"{name}.experts.{clean_name(key)}", layer, weight


def _gathered(layer: MoELayer, weight: nn.Parameter) -> Tensor:
    group = layer.dispatcher.group
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, weight.detach().contiguous(), group=group)
    return torch.cat(parts)


def _ranks_with_the_same_experts(layout: Layout) -> list[dist.ProcessGroup]:
    mesh = layout.expert_mesh
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def _averaged(grad: Tensor, groups: list[dist.ProcessGroup], world: int) -> Tensor:
    """This rank's gradient already sums over its expert-parallel partners' tokens; `groups` bring in the others'."""
    grad = grad / world
    for group in groups:
        dist.all_reduce(grad, group=group)
    return grad
