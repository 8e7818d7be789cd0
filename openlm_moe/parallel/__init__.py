"""How a model is spread over processes: meshes, sharding, expert parallelism, clipping, checkpoints."""

from openlm_moe.parallel.check import PlanError, check_plan
from openlm_moe.parallel.checkpoint import Checkpointer
from openlm_moe.parallel.clip import clip_grad_norm_
from openlm_moe.parallel.fsdp import apply_expert_parallel, apply_fsdp, gradient_sync, materialise, parallelize
from openlm_moe.parallel.fsdp1 import (
    fsdp1_clip_grad_norm_,
    fsdp1_expert_parallel,
    fsdp1_ignored_states,
    fsdp1_wrap_policy,
    gather_experts,
    scatter_experts,
)
from openlm_moe.parallel.mesh import Layout, init_distributed, make_layout, shutdown
from openlm_moe.parallel.stop import StopRequest

__all__ = [
    "Checkpointer",
    "Layout",
    "PlanError",
    "StopRequest",
    "apply_expert_parallel",
    "apply_fsdp",
    "check_plan",
    "clip_grad_norm_",
    "fsdp1_clip_grad_norm_",
    "fsdp1_expert_parallel",
    "fsdp1_ignored_states",
    "fsdp1_wrap_policy",
    "gather_experts",
    "gradient_sync",
    "init_distributed",
    "make_layout",
    "materialise",
    "parallelize",
    "scatter_experts",
    "shutdown",
]
