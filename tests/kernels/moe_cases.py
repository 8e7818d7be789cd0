"""What the tests of the kernels share: plain oracles in float64, error bounds, cases, and buffers poisoned with NaN.

The oracles use autograd and torch.matmul alone and share no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck
from torch import Tensor

BACKENDS = ("torch", "reference")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# ||got - want|| / ||want|| against float64 on the same numbers. An all-zero result has error 1.
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

ODD_SIZES = (1, 7, 8, 17, 36, 63, 65, 96, 176)  # 176 is DeepSeek's 1408, an eighth of it
# name -> rows of each group, rows past the last
GROUPS = {
    "empty first": ((0, 5, 40), 3),
    "empty in the middle": ((33, 0, 0, 7), 0),
    "empty last": ((40, 1, 0), 0),
    "one row each": ((1, 1, 1, 1, 1), 0),
    "all rows in one group": ((0, 0, 70, 0), 0),
    "only the tail": ((0, 0), 37),
    "a long tail": ((3, 0, 4), 66),
    "around a tile": ((31, 32, 33, 0, 64), 1),
    "report A3": ((0, 1, 7, 8, 9), 5),
    "report A4, a tenth": ((16, 0, 258, 45, 0, 8), 0),
    "report A5": (tuple(range(0, 128, 9)), 0),
    "no rows": ((0, 0, 0), 0),
}
# Settings of hypothesis for tests with fixtures, which here may serve all examples of a test.
WITH_FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the size of what is wanted; 0 or infinity where that is zero."""
    difference = (got.detach().double() - want.double()).norm().item()
    size = want.double().norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    found, bound = error(got, want), factor * BOUNDS[dtype]
    assert found <= bound, f"{name} is off by {found:.2g} of its size; at most {bound:.2g} is rounding"


def poisoned(t: Tensor) -> Tensor:
    """An equal view with a unit last stride, whose neighbours in memory are NaN in every dimension."""
    buffer = torch.full([size + 2 for size in t.shape], float("nan"), dtype=t.dtype)
    view = buffer[tuple(slice(1, size + 1) for size in t.shape)]
    return view.copy_(t)


def transposed(t: Tensor) -> Tensor:
    """An equal view whose last two dimensions are swapped in memory."""
    return t.mT.contiguous().mT


LAYOUTS = {"contiguous": torch.clone, "poisoned": poisoned, "transposed": transposed}


def act(pre: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return pre
    if activation == "gelu":
        return F.gelu(pre, approximate="tanh")
    half = pre.shape[-1] // 2
    return F.silu(pre[..., :half]) * pre[..., half:]


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def loop_products(x: Tensor, w: Tensor, sizes: tuple[int, ...], tail: int, activation: str | None = None) -> Tensor:
    """act(x_e w_e) for each group, zeros in the tail."""
    parts = [act(x_e @ w[e], activation) for e, x_e in enumerate(x[: sum(sizes)].split(list(sizes)))]
    return F.pad(torch.cat(parts), (0, 0, 0, tail))


def loop_ffn(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, ids: Tensor, activation: str) -> Tensor:
    """The layer's formula, expert by expert over masks."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        for k in range(ids.shape[1]):
            tokens = (ids[:, k] == e).nonzero()[:, 0]
            y = act(x[tokens] @ w1[e], activation) @ w2[e]
            out = out.index_add(0, tokens, weights[tokens, k, None] * y)
    return out


@dataclass(frozen=True)
class Layer:
    """Sizes of one expert feed-forward; `sentinels` is the share of slots without an expert."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    activation: str = "gelu"
    dtype: torch.dtype = torch.float64
    sentinels: float = 0.0

    def ids(self) -> Tensor:
        """Distinct experts a token, expert 0 the most popular, the last one without tokens where there are enough."""
        scores = torch.rand(self.tokens, self.experts)
        scores[:, 0] += 0.4
        if self.experts > self.top_k:
            scores[:, -1] = -1
        ids = scores.topk(self.top_k, dim=1).indices
        return ids.masked_fill(torch.rand(ids.shape) < self.sentinels, self.experts)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weights, w1 and w2, weights in float32 or better."""
        width = self.hidden * (2 if self.activation == "swiglu" else 1)
        return (
            torch.randn(self.tokens, self.dim, dtype=self.dtype),
            torch.rand(self.tokens, self.top_k, dtype=torch.promote_types(self.dtype, torch.float32)),
            (torch.randn(self.experts, self.dim, width, dtype=torch.float64) * self.dim**-0.5).to(self.dtype),
            (torch.randn(self.experts, self.hidden, self.dim, dtype=torch.float64) * self.hidden**-0.5).to(self.dtype),
        )


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


NAMES = ("out", "dx", "dweights", "dw1", "dw2")


def loop_gradients(layer: Layer, tensors, ids: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the loop in float64."""
    exact = leaves(*(t.double() for t in tensors))
    out = loop_ffn(*exact, ids, layer.activation)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, exact, dout.double())), strict=True))
