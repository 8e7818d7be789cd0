"""Grouped GEMMs and the expert feed-forward of a mixture-of-experts layer, on torch and triton alone."""

from openlm_moe_kernels.expert_ffn import expert_ffn
from openlm_moe_kernels.plan import RoutePlan, route_plan

__all__ = ["RoutePlan", "expert_ffn", "route_plan"]
