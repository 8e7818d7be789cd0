"""--verify-kernels: the experts' kernels against plain arithmetic on this model's shapes, before step 0."""

from __future__ import annotations

from collections.abc import Callable

import torch

from openlm_moe import MoEConfig
from openlm_moe_kernels import expert_ffn, route_plan
from openlm_moe_kernels.backend import select

TOKENS = 192
MOST_EXPERTS = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class WrongKernel(Exception):
    """A kernel computes something else than it should on this device."""


def verify_kernels(
    dim: int, moe: MoEConfig, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    """Compares forward and every gradient of the experts with the reference backend; says what was verified.

    Raises `WrongKernel` naming the tensor and the error relative to its scale.
    """
    backend = select(moe.backend, device, dtype)
    if backend != "triton":
        say(f"experts run on the {backend} backend; no Triton kernel was verified")
        return
    n_experts, hidden = min(moe.num_experts, MOST_EXPERTS), moe.hidden_dim(dim)
    top_k = min(moe.top_k, n_experts)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype).requires_grad_()

    x_TD = normal(TOKENS, dim)
    w1 = normal(n_experts, dim, hidden * (2 if moe.ffn == "swiglu" else 1), scale=dim**-0.5)
    w2 = normal(n_experts, hidden, dim, scale=hidden**-0.5)
    scores_TE = torch.rand(TOKENS, n_experts, generator=generator).to(device)
    weights_TK, experts_TK = scores_TE.topk(top_k, dim=-1)
    weights_TK = weights_TK.float().requires_grad_()
    gradient_TD = normal(TOKENS, dim).detach()

    results = []
    for name in (backend, "reference"):
        plan = route_plan(experts_TK, n_experts)
        out_TD = expert_ffn(x_TD, weights_TK, w1, w2, plan, activation=moe.ffn, backend=name)
        gradients = torch.autograd.grad(out_TD, (x_TD, weights_TK, w1, w2), gradient_TD)
        results.append((out_TD.detach(), *gradients))
    worst = 0.0
    for what, ours, right in zip(("output", "dx", "dweights", "dw1", "dw2"), *results, strict=True):
        error = float((ours.float() - right.float()).abs().max() / right.float().abs().max())
        worst = max(worst, error)
        if not error <= TOLERANCE[dtype]:
            raise WrongKernel(
                f"the {backend} kernels give a wrong {what} on this device (relative error {error:.1e}); "
                "train with --moe-backend torch"
            )
    say(f"experts run on the {backend} backend; verified on this model's shapes (largest relative error {worst:.1e})")
