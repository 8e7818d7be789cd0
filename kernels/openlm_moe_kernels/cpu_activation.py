"""The experts' activations on the CPU, in blocks of rows that stay in a core's cache from the first step to the last.

torch's own GELU evaluates tanh in software and its derivative evaluates it again; that is most of the time that the
activations take. With u = x + 0.044715 x^3 and h = sigmoid(c u), c = sqrt(8/pi), the same function is gelu(x) = x h,
and its derivative h (1 + (x - x h) (c + 3 c 0.044715 x^2)). The product of anything with h is one vectorised step, the
one that torch has as the derivative of softplus. All steps run in float32 (float64), whatever the operands' dtype.

Shapes: M rows, F expert hidden dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_C = math.sqrt(8 / math.pi)
_CUBIC = 0.044715

# Elements of one buffer of a block and a thread: the six float32 buffers fit a second-level cache of 2 MiB.
BLOCK_ELEMENTS = 1 << 16


class BlockedActivation:
    """Forward and backward of one activation over rows of width F, with the scratch that its blocks share."""

    def __init__(self, activation: str | None, hidden: int, dtype: torch.dtype) -> None:
        self.forward_step, self.backward_step, factor = _STEPS[activation]
        self.step = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // max(1, hidden))
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.converts = self.dtype != dtype
        self.work = self._buffers(hidden, hidden)
        if self.converts:
            self.pre, self.dpre, self.da, self.act = self._buffers(hidden * factor, hidden * factor, hidden, hidden)

    def _buffers(self, *widths: int) -> list[Tensor]:
        return [torch.empty(self.step, width, dtype=self.dtype) for width in widths]

    def forward(self, pre: Tensor, out: Tensor) -> None:
        """out (M, F) = act(pre); pre is (M, F) or (M, 2F)."""
        for rows, m in self._blocks(pre):
            u = self.work[0][:m]
            if self.converts:
                act = self.act[:m]
                self.forward_step(self.pre[:m].copy_(pre[rows]), act, u)
                out[rows].copy_(act)
            else:
                self.forward_step(pre[rows], out[rows], u)

    def backward(self, pre: Tensor, da: Tensor, act: Tensor, dpre: Tensor, dscale: Tensor) -> None:
        """act = act(pre), dpre = act'(pre) * da, dscale (M,) = <da, act>. Overwrites `da`."""
        for rows, m in self._blocks(pre):
            work = [buffer[:m] for buffer in self.work]
            if self.converts:
                x, d = self.pre[:m].copy_(pre[rows]), self.da[:m].copy_(da[rows])
                self.backward_step(x, d, self.act[:m], self.dpre[:m], dscale[rows], *work)
                act[rows].copy_(self.act[:m])
                dpre[rows].copy_(self.dpre[:m])
            else:
                self.backward_step(pre[rows], da[rows], act[rows], dpre[rows], dscale[rows], *work)

    def _blocks(self, pre: Tensor) -> Iterator[tuple[slice, int]]:
        n_rows = pre.shape[0]
        for a in range(0, n_rows, self.step):
            b = min(a + self.step, n_rows)
            yield slice(a, b), b - a


def _times_sigmoid(y: Tensor, x: Tensor, scale: float, out: Tensor) -> None:
    """out = y * sigmoid(scale * x). Where that sigmoid is 1 to the dtype's precision, its exponential is not needed."""
    saturated = 20.0 if x.dtype == torch.float32 else 40.0
    torch.ops.aten.softplus_backward.grad_input(y, x, scale, saturated, grad_input=out)


def _gelu(x: Tensor, act: Tensor, u: Tensor) -> None:
    torch.mul(x, x, out=u)
    torch.addcmul(x, x, u, value=_CUBIC, out=u)
    _times_sigmoid(x, u, _C, out=act)


def _gelu_backward(x: Tensor, da: Tensor, act: Tensor, dx: Tensor, dscale: Tensor, u: Tensor, q: Tensor) -> None:
    torch.mul(x, x, out=q)
    torch.addcmul(x, x, q, value=_CUBIC, out=u)
    _times_sigmoid(x, u, _C, out=act)
    _row_dots(da, act, dx, out=dscale)
    _times_sigmoid(da, u, _C, out=dx)
    torch.sub(x, act, out=u)
    torch.addcmul(u, u, q, value=3 * _CUBIC, out=u)
    torch.addcmul(dx, dx, u, value=_C, out=dx)


def _swiglu(x: Tensor, act: Tensor, u: Tensor) -> None:
    gate, up = x.chunk(2, dim=1)
    torch.mul(gate, up, out=u)
    _times_sigmoid(u, gate, 1.0, out=act)


def _swiglu_backward(x: Tensor, da: Tensor, act: Tensor, dx: Tensor, dscale: Tensor, s: Tensor, t: Tensor) -> None:
    (gate, up), (dgate, dup) = x.chunk(2, dim=1), dx.chunk(2, dim=1)
    _times_sigmoid(gate, gate, 1.0, out=s)
    torch.mul(s, up, out=act)
    _row_dots(da, act, t, out=dscale)
    torch.mul(da, s, out=dup)
    da.mul_(up)
    torch.ops.aten.silu_backward.grad_input(da, gate, grad_input=dgate)


def _identity(x: Tensor, act: Tensor, u: Tensor) -> None:
    act.copy_(x)


def _identity_backward(x: Tensor, da: Tensor, act: Tensor, dx: Tensor, dscale: Tensor, u: Tensor, q: Tensor) -> None:
    _row_dots(da, x, u, out=dscale)
    dx.copy_(da)
    act.copy_(x)


def _row_dots(a: Tensor, b: Tensor, work: Tensor, out: Tensor) -> None:
    """out (M,) = <a[m], b[m]>."""
    torch.mul(a, b, out=work)
    torch.sum(work, dim=1, out=out)


# Forward and backward step, and how many columns of the pre-activation one of the activation takes.
_STEPS = {
    "gelu": (_gelu, _gelu_backward, 1),
    "swiglu": (_swiglu, _swiglu_backward, 2),
    None: (_identity, _identity_backward, 1),
}
