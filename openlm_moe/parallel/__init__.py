"""How a model is spread over processes: meshes, sharding, expert parallelism, clipping, checkpoints."""

from openlm_moe.parallel.checkpoint import Checkpointer
from openlm_moe.parallel.clip import clip_grad_norm_
from openlm_moe.parallel.mesh import Layout, init_distributed, make_layout, shutdown
from openlm_moe.parallel.stop import StopRequest

__all__ = [
    "Checkpointer",
    "Layout",
    "StopRequest",
    "clip_grad_norm_",
    "init_distributed",
    "make_layout",
    "shutdown",
]
