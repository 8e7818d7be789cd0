"""--verify-kernels: the experts' kernels against plain arithmetic on this model's shapes, before step 0."""

from __future__ import annotations

from collections.abc import Callable

import torch

from openlm_moe import MoEConfig, UserError
from openlm_moe_kernels.verify import chosen_backend, require_verified, verify_expert_ffn


def verify_kernels(
    dim: int, moe: MoEConfig, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    """Compares the Triton kernels, forward and backward, with the reference on this device, and says what was verified.

    Raises `openlm_moe_kernels.verify.KernelMismatch` where one is wrong, and `UserError` for a backend that cannot run.
    """
    try:
        backend = chosen_backend(moe.backend, device, dtype)
    except ValueError as error:
        raise UserError(f"--moe-backend {moe.backend}: {error}") from None
    if backend != "triton":
        say(f"experts run on the {backend} backend; no Triton kernel was verified")
        return
    checks = verify_expert_ffn(
        dim,
        moe.hidden_dim(dim),
        moe.num_experts,
        top_k=moe.top_k,
        activation=moe.ffn,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    require_verified("the experts", checks, backend)
    worst = max(check.error for check in checks)
    say(f"experts run on the {backend} backend, verified on this model's shapes (largest relative error {worst:.1e})")
