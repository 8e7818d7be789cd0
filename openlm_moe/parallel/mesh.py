"""Who holds what: the process group, and the meshes that parameters live on.

Every rank is numbered (replicate, shard, ep), ep innermost so that expert-parallel partners sit on one node:

    dense parameters    sharded over (shard, ep) together, replicated over `replicate`
    expert parameters   experts split over `ep`, each split further over `shard`, replicated over `replicate`

Without FSDP nothing is sharded beside the experts: `shard` is 1, and dense parameters are replicated over all ranks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from math import gcd

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from openlm_moe.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How a model is spread over the ranks. The meshes are None in a single process that has no process group."""

    world_size: int
    rank: int
    local_rank: int
    local_world_size: int
    device: torch.device
    expert_parallel: int = 1
    fsdp: bool = False
    # Meshes of (shard,) or (replicate, shard):
    dense_mesh: DeviceMesh | None = None  # for every parameter outside the experts
    expert_mesh: DeviceMesh | None = None  # for the experts: the ranks that hold the same ones
    ep_mesh: DeviceMesh | None = None  # (ep,); None when every rank holds all experts

    @property
    def is_main(self) -> bool:
        """True on the one rank that logs and writes files."""
        return self.rank == 0


def init_distributed(timeout_s: float = 600.0) -> torch.device:
    """Joins the process group that torchrun's environment describes; returns this rank's own device.

    Without torchrun (no WORLD_SIZE), and for a world of one, there is no process group. A collective that takes longer
    than `timeout_s` seconds raises, so that a dead or stuck rank ends the job.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _local_device(local_rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    return device


def shutdown() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        let_gloo_finish()
        dist.destroy_process_group()


def let_gloo_finish() -> None:
    """Leaves the interpreter to gloo's threads for a moment; to be called between the last collective and the end.

    They drop a collective's tensors shortly after it is done, and need Python's lock for it. One that asks for the lock
    when the interpreter has ended aborts the process, and a run that was complete exits with 134.
    """
    time.sleep(0.2)


def _local_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: this node shows {torch.cuda.device_count()}; "
            f"start at most that many processes a node (torchrun --nproc-per-node {torch.cuda.device_count()})"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def make_layout(
    fsdp: bool,
    hybrid: bool = False,
    expert_parallel: str | int = "off",
    num_experts: int = 0,
    device: torch.device | None = None,
) -> Layout:
    """The layout of this world. `device` is this rank's own, as `init_distributed` returned it.

    `hybrid` shards within a node and replicates across nodes (needs `fsdp`). `expert_parallel` is "off", "auto" (the
    largest divisor of both `num_experts` and the ranks of a node) or the number of ranks that split the experts.

    Raises `UserError`, with the numbers that would fit, when the split does not come out even.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _local_device(local_rank) if device is None else device
    if hybrid and not fsdp:
        raise UserError("--fsdp-hybrid needs --fsdp: it says how the shards are laid over the nodes")
    if fsdp and not dist.is_initialized():
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if hybrid and world % local_world:
        raise UserError(
            f"--fsdp-hybrid needs nodes of equal size: {world} ranks are no multiple of {local_world} a node"
        )
    span = local_world if hybrid else world  # the ranks within which parameters, and so experts, may be split
    ep = expert_parallel_size(expert_parallel, num_experts, span, local_world)
    meshes: dict[str, DeviceMesh | None] = {}
    if dist.is_initialized():
        meshes = _meshes(world, span, ep, fsdp, device)
    return Layout(world, rank, local_rank, local_world, device, ep, fsdp, **meshes)


def expert_parallel_size(wanted: str | int, num_experts: int, span: int, local_world: int) -> int:
    """How many ranks split the experts. `span` is the number of ranks they may be split over.

    Raises `UserError` naming the sizes that fit when `wanted` divides not both the experts and `span`.
    """
    if str(wanted) == "off" or num_experts == 0:
        return 1
    if str(wanted) == "auto":
        return gcd(num_experts, gcd(local_world, span))
    try:
        ep = int(wanted)
    except ValueError:
        raise UserError(f"--expert-parallel is {wanted!r}; it must be a number, auto or off") from None
    fits = [n for n in range(1, span + 1) if span % n == 0 and num_experts % n == 0]
    if ep not in fits:
        raise UserError(
            f"--expert-parallel {ep} does not fit {num_experts} experts on {span} ranks: it must divide both; "
            f"{', '.join(map(str, fits))} would fit"
        )
    return ep


def _backend(device: torch.device) -> str:
    """Tensors on the host (checkpoint plans, stop requests) go through gloo, whatever trains on the accelerator."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def _meshes(world: int, span: int, ep: int, fsdp: bool, device: torch.device) -> dict[str, DeviceMesh | None]:
    names = ("replicate", "shard", "ep")
    if not fsdp:
        cube = init_device_mesh(device.type, (world // ep, 1, ep), mesh_dim_names=names)
        dense = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
        return _named(dense, cube["replicate", "shard"], cube, ep)
    cube = init_device_mesh(device.type, (world // span, span // ep, ep), mesh_dim_names=names)
    cube["shard", "ep"]._flatten("shard_ep")
    if world == span:  # a replicate dimension of 1 would cost an all-reduce of one rank with itself
        return _named(cube["shard_ep"], cube["shard"], cube, ep)
    return _named(cube["replicate", "shard_ep"], cube["replicate", "shard"], cube, ep)


def _named(dense: DeviceMesh, expert: DeviceMesh, cube: DeviceMesh, ep: int) -> dict[str, DeviceMesh | None]:
    return {"dense_mesh": dense, "expert_mesh": expert, "ep_mesh": cube["ep"] if ep > 1 else None}
