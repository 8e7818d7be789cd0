"""Checks, on the very device that will train, that the kernels compute what the formula says.

A wrong grouped GEMM can train: the loss looks plausible and the model is useless. So this compares the backend in use,
with its real tile choice, against the reference arithmetic on the same numbers, forward and backward.

Shape letters: T tokens, K top-k, D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openlm_moe_kernels import backend as backends
from openlm_moe_kernels import expert_ffn, route_plan

# Largest error of any part of a result, relative to that part's norm. The half types round the activations between the
# two products, which the reference keeps in float32.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# More experts repeat the same tiles on other weights; more tokens repeat the same rows.
MAX_EXPERTS = 4
TOKENS_PER_EXPERT = 160
EDGE = 16


@dataclass(frozen=True)
class Check:
    """The largest relative error that one result showed, and what it may be."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN


class KernelMismatch(RuntimeError):
    """A kernel computed something else than the reference."""


def verify_expert_ffn(
    dim: int,
    hidden_dim: int,
    num_experts: int,
    *,
    top_k: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "auto",
) -> list[Check]:
    """Runs `expert_ffn` forward and backward for one layer's shapes and compares every result with the reference.

    One expert gets no token, one gets half of them, and one token goes nowhere. Each result is compared as a whole, at
    its last rows and at its last columns, where tails of tiles go wrong, and a weight's gradient expert by expert.
    At most 4 experts are built, so memory stays at a few of the layer's expert matrices.
    """
    n_experts = max(2, min(num_experts, MAX_EXPERTS))
    top_k = min(top_k, n_experts - 1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    width = 2 * hidden_dim if activation == "swiglu" else hidden_dim
    n_tokens = TOKENS_PER_EXPERT * n_experts + 3
    ids_TK = _skewed_ids(n_tokens, top_k, n_experts, generator).to(device)
    x, dout = normal(n_tokens, dim), normal(n_tokens, dim)
    weights = torch.rand(n_tokens, top_k, generator=generator).to(device, max(dtype, torch.float32, key=_bits))
    w1 = normal(n_experts, dim, width, scale=dim**-0.5)
    w2 = normal(n_experts, hidden_dim, dim, scale=hidden_dim**-0.5)

    got = _run(x, weights, w1, w2, dout, ids_TK, activation, backend)
    exact = torch.float64 if dtype in (torch.float64, torch.float32) else torch.float32
    want = _run(*(t.to(exact) for t in (x, weights, w1, w2, dout)), ids_TK, activation, "reference")
    return [
        Check(name, max(_relative_errors(got[name], want[name], per_expert=name in ("dw1", "dw2"))), BOUNDS[dtype])
        for name in want
    ]


def require_verified(layer: str, checks: list[Check], backend: str) -> None:
    """Raises `KernelMismatch` naming what failed of `layer`'s checks."""
    for check in checks:
        if not check.passed:
            raise KernelMismatch(
                f"{layer}: {check.name} computed by backend {backend} is off by {check.error:.2g} of its size (at most "
                f"{check.bound:.0e} is rounding); do not train with it: pass --moe-backend torch, and please report "
                "the output of python -m openlm_moe.doctor"
            )


def chosen_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `backend` stands for on this device and dtype."""
    return backends.select(backend, device, dtype)


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _skewed_ids(n_tokens: int, top_k: int, n_experts: int, generator: torch.Generator) -> Tensor:
    """Expert 1 of n is empty, expert 0 is the first choice of half the tokens, the last token goes nowhere."""
    scores = torch.rand(n_tokens, n_experts, generator=generator)
    scores[: n_tokens // 2, 0] += 1
    scores[:, 1] = -1
    ids = scores.topk(top_k, dim=-1).indices
    ids[-1] = n_experts
    return ids


def _run(
    x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, dout: Tensor, ids: Tensor, activation: str, backend: str
) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weights, w1, w2)]
    plan = route_plan(ids, w1.shape[0])
    out = expert_ffn(*leaves, plan, activation=activation, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), **dict(zip(("dx", "dweights", "dw1", "dw2"), grads, strict=True))}


def _relative_errors(got: Tensor, want: Tensor, per_expert: bool) -> list[float]:
    pairs = list(zip(got, want, strict=True)) if per_expert else [(got, want)]
    errors = []
    for g, w in pairs:
        parts = [(g, w), (g[-EDGE:], w[-EDGE:]), (g[..., -EDGE:], w[..., -EDGE:])]
        errors += [_relative_error(a, b) for a, b in parts]
    return errors


def _relative_error(got: Tensor, want: Tensor) -> float:
    difference = (got.to(want.dtype) - want).norm().item()
    size = want.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size
