"""What a backend is: a module with the functions below. Chosen per call by `select`; nothing here launches anything.

Shape letters: T tokens, K top-k, N = T*K routed rows in expert order, M rows of a generic product, D model dim,
F expert hidden dim, E experts. In `Backend`'s functions the K and N of a product are the GEMM's own.

The public functions validate first and call a backend afterwards, so a backend may assume:

- all tensors on one device; `x`, `w` and gradients of one dtype among float16, bfloat16, float32, float64
- `offsets` int32 (E,), contiguous, non-decreasing cumulative ends between 0 and the number of rows; group e is
  rows [offsets[e-1], offsets[e]), from 0 for e = 0; rows at and past offsets[E-1] are the tail
- tensors may be non-contiguous views with any non-negative strides, offsets beyond 2^31 elements included
- `gather` int64 (M,): row m of the product reads x[gather[m]]; every value is in range, tail included
- `row_scale` (M,) of any float dtype: multiplied in the accumulation dtype, after the activation

and must guarantee:

- accumulation in float32 (float64 for float64), results in the input's dtype
- tail rows of every output are exact zeros, whatever the tail of the inputs holds (NaN included): the tail is not read
- the gradient of an empty group's weight is exactly zero
- bit-identical results for identical calls (no atomics on floats)
- float32 products in IEEE precision unless `allow_tf32`
- no wait on the device and no allocation that outlives the call, apart from the results
"""

from __future__ import annotations

import importlib
import logging
import warnings
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from openlm_moe_kernels.plan import RoutePlan

logger = logging.getLogger("openlm_moe_kernels")

ACTIVATIONS = ("gelu", "swiglu")  # tanh-approximated GELU; silu(gate) * up with the gate half first
MODULES = {
    "triton": "openlm_moe_kernels.triton_backend",
    "torch": "openlm_moe_kernels.torch_backend",
    "reference": "openlm_moe_kernels.reference",
}
NAMES = ("auto", *MODULES)


class Backend(Protocol):
    """The functions that a backend module provides. None of them records a graph."""

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run there, as the end of "... cannot run: "; None where it can."""

    def tile_map(self, offsets_E: Tensor, num_rows: int) -> Tensor:
        """What `RoutePlan.tiles` holds for this backend: int32, made on the device, reused by every GEMM of a layer.

        An empty `RoutePlan.tiles` means that nobody has made it.
        """

    def tile_map_shape(self, num_rows: int, num_experts: int) -> tuple[int, ...]:
        """Shape of `tile_map`'s result, from sizes alone (they may be symbolic)."""

    def grouped_gemm(
        self,
        x: Tensor,
        w: Tensor,
        offsets: Tensor,
        *,
        trans_w: bool = False,
        gather: Tensor | None = None,
        activation: str | None = None,
        row_scale: Tensor | None = None,
        allow_tf32: bool = False,
    ) -> Tensor:
        """x (M, K), or (any, K) with `gather` (M,); w (E, K, N), or (E, N, K) with `trans_w` -> (M, N).

        With activation "swiglu" the product has 2N columns, gate half first, and the result N.
        The input gradient of a grouped GEMM is this function with `trans_w` flipped.
        """

    def grouped_gemm_wgrad(
        self,
        x: Tensor,
        dy: Tensor,
        offsets: Tensor,
        *,
        trans_w: bool = False,
        gather: Tensor | None = None,
        out: Tensor | None = None,
        allow_tf32: bool = False,
    ) -> Tensor:
        """x (M, K) or gathered, dy (M, N) -> x_e^T dy_e (E, K, N), or its transpose (E, N, K) with `trans_w`.

        With `out`: added to it (float32 or the inputs' dtype, any strides), and `out` is returned.
        """

    def gather_rows(self, x: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None) -> Tensor:
        """x_TD -> x[plan.tokens] (N, D), the tail zero. With `scale_TK`, row n is multiplied by its slot's scale."""

    def combine_topk(self, y: Tensor, weights_TK: Tensor | None, plan: RoutePlan) -> Tensor:
        """y_ND -> sum over k of weights[t, k] * y[plan.inverse[t*K + k]] (T, D); tail rows are skipped, not read.

        `weights_TK` None means ones.
        """

    def combine_topk_dweights(self, dout: Tensor, y: Tensor, plan: RoutePlan) -> Tensor:
        """dout_TD, y_ND -> <dout[t], y[inverse[t*K + k]]> (T, K) in the accumulation dtype; zero for tail rows."""

    def act_backward(
        self, pre: Tensor, da: Tensor, offsets: Tensor, activation: str | None, row_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """pre (N, F) or (N, 2F), da (N, F) = gradient of row_scale * act(pre) -> (dpre, act, dscale).

        dpre = act'(pre) * row_scale * da, like `pre`; act = row_scale * act(pre), (N, F), the second product's input in
        its weight gradient; dscale = <da, act(pre)>, (N,) in the accumulation dtype. Activation None is the identity.
        """

    def ffn_forward(
        self,
        x: Tensor,
        weights_TK: Tensor,
        w1: Tensor,
        w2: Tensor,
        plan: RoutePlan,
        activation: str,
        *,
        keep_pre: bool = True,
        allow_tf32: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x_TD, w1 (E, D, F) or (E, D, 2F), w2 (E, F, D) -> (out_TD, pre_NF or pre_N2F).

        out[t] = sum over k of weights[t, k] * act(x[t] w1_e) w2_e. `pre` is (0, 0) unless `keep_pre`.
        """

    def ffn_backward(
        self,
        dout: Tensor,
        x: Tensor,
        weights_TK: Tensor,
        w1: Tensor,
        w2: Tensor,
        pre: Tensor,
        plan: RoutePlan,
        activation: str,
        needs: tuple[bool, bool, bool, bool],
        *,
        allow_tf32: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients (dx, dweights, dw1, dw2) in their inputs' dtypes; an empty (0,) tensor for each not in `needs`."""


@cache
def load(name: str) -> Backend:
    """The backend module called `name`; ImportError where its packages are missing."""
    return cast(Backend, importlib.import_module(MODULES[name]))


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why backend `name` cannot run on this device and dtype; None where it can."""
    try:
        return load(name).unsupported(device, dtype)
    except ImportError as error:
        return f"{error.name or error} is not installed"


def run(name: str, x: Tensor) -> Backend:
    """The backend that `name` stands for, for tensors like `x`."""
    return load(select(name, x.device, x.dtype))


@cache
def select(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolves `auto` and checks a name that was given.

    `auto` takes triton where it runs and torch elsewhere, and logs choice and reason once; on a GPU that triton does
    not serve it warns, once. A name other than `auto` is never replaced: ValueError where it cannot run.
    """
    if name != "auto":
        if reason := why_not(name, device, dtype):
            raise ValueError(f"backend {name!r} cannot run: {reason}")
        return name
    reason = why_not("triton", device, dtype)
    if reason is None:
        logger.info("backend auto chose triton for %s on %s: it runs there", dtype, device)
        return "triton"
    if device.type != "cpu":
        warnings.warn(f"backend auto fell back to torch: triton cannot run: {reason}", stacklevel=3)
    logger.info("backend auto chose torch for %s on %s: triton cannot run: %s", dtype, device, reason)
    return "torch"
