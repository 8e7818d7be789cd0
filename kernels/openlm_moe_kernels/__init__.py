"""Grouped GEMMs and the expert feed-forward of a mixture-of-experts layer, on torch and triton alone.

    plan = route_plan(expert_ids_TK, num_experts)
    out_TD = expert_ffn(x_TD, weights_TK, w1, w2, plan, activation="swiglu")

`expert_ffn` is the whole layer after its router in one autograd function. The parts it is made of are public as well.
Every operation runs on each backend: `triton` on GPUs, `torch` anywhere, `reference` plainly and in float64 too.
"""

from openlm_moe_kernels.activation import activation_backward
from openlm_moe_kernels.ffn import expert_ffn
from openlm_moe_kernels.gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from openlm_moe_kernels.plan import RoutePlan
from openlm_moe_kernels.routing import route_plan
from openlm_moe_kernels.rows import combine_topk, gather_rows

__all__ = [
    "RoutePlan",
    "activation_backward",
    "combine_topk",
    "expert_ffn",
    "gather_rows",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
    "route_plan",
]
