"""Checks of the kernels that move rows and of the activation's backward; a slot without an expert holds NaN.

Shape letters: T tokens, K top-k, N = T*K rows in expert order, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton_cases import DEVICE, assert_close, ends, poisoned, random

from openlm_moe_kernels import reference, route_plan
from openlm_moe_kernels.gpu import activation as activation_kernels
from openlm_moe_kernels.gpu import rows as row_kernels

NAN = float("nan")


def columns_first(t: Tensor) -> Tensor:
    """An equal view, transposed in memory and amid NaN."""
    return poisoned(t.mT.contiguous()).mT


def is_zero(t: Tensor) -> bool:
    return t.count_nonzero().item() == 0  # NaN counts


@dataclass(frozen=True)
class Rows:
    """Routing of `tokens` to `top_k` of `experts`, or to none of them, and rows of `dim`."""

    tokens: int
    top_k: int
    experts: int
    dim: int
    dtype: torch.dtype = torch.float32
    transposed: bool = False


def check_rows(case: Rows, ops: Any = row_kernels) -> None:
    """Gather, combine and the weights' gradient of `ops` against float64."""
    view = columns_first if case.transposed else poisoned
    ids = torch.randint(0, case.experts + 1, (case.tokens, case.top_k), device=DEVICE)
    plan, has_expert = route_plan(ids, case.experts), ids < case.experts
    routed = int(plan.offsets_E[-1])
    x, y = (random(n, case.dim, dtype=case.dtype) for n in (case.tokens, plan.num_rows))
    weights = torch.rand(ids.shape, device=DEVICE) + 0.5
    x_exact, y_exact = x.double(), torch.where(has_expert.flatten()[:, None], y[plan.inverse_N].double(), 0.0)
    y_exact, weights_exact = y_exact.view(*ids.shape, case.dim), weights.double()
    x[~has_expert.any(1)] = NAN
    y[routed:] = NAN
    weights[~has_expert] = NAN
    x, y, weights = view(x), view(y), poisoned(weights)

    tokens, slots = plan.tokens_N[:routed], plan.order_N[:routed]
    gathered = ops.gather_rows(x, plan)
    assert torch.equal(gathered[:routed].double(), x_exact[tokens])
    scaled = ops.gather_rows(x, plan, weights)
    assert_close(scaled[:routed], weights_exact.flatten()[slots, None] * x_exact[tokens], case.dtype)
    assert is_zero(gathered[routed:]) and is_zero(scaled[routed:]), "rows without an expert are not zero"

    combined = ops.combine_topk(y, weights, plan)
    assert_close(combined, (weights_exact[..., None] * y_exact).sum(1), case.dtype)
    assert_close(ops.combine_topk(y, None, plan), y_exact.sum(1), case.dtype)
    assert is_zero(combined[~has_expert.any(1)])

    dots = ops.combine_topk_dweights(x, y, plan)
    assert_close(dots, (x_exact[:, None] * y_exact).sum(-1), torch.float32)  # not rounded to the rows' dtype
    assert dots.dtype == torch.float32 and is_zero(dots[~has_expert])


def check_long_sums(dtype: torch.dtype, ops: Any = row_kernels) -> None:
    """1 + 64 * 2^-10 is lost when each sum is rounded to bfloat16 (float16: 2^-13)."""
    small = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-13
    y = torch.full((65, 32), small, dtype=dtype, device=DEVICE)
    y[0] = 1
    plan = route_plan(torch.zeros(1, 65, dtype=torch.int64, device=DEVICE), 1)
    expected = torch.tensor(1 + 64 * small, dtype=dtype, device=DEVICE).expand(1, 32)
    for weights in (None, torch.ones(1, 65, device=DEVICE)):
        assert torch.equal(ops.combine_topk(y, weights, plan), expected)


@dataclass(frozen=True)
class ActBackward:
    """Rows and columns of an activation's backward, and how it is asked for."""

    sizes: tuple[int, ...]
    tail: int
    hidden: int
    activation: str | None
    dtype: torch.dtype = torch.float32
    scaled: bool = True
    transposed: bool = False
    overwrite_da: bool = False


def check_act_backward(
    case: ActBackward, function: Callable[..., tuple[Tensor, Tensor, Tensor]] = activation_kernels.act_backward
) -> None:
    """Runs `function` on poisoned inputs and compares with float64's autograd."""
    view = columns_first if case.transposed else poisoned
    routed, width = sum(case.sizes), case.hidden * (2 if case.activation == "swiglu" else 1)
    pre = random(routed + case.tail, width, dtype=case.dtype, scale=2)
    da = random(routed + case.tail, case.hidden, dtype=case.dtype)
    scale = torch.rand(routed + case.tail, device=DEVICE) + 0.5
    exact_pre = pre[:routed].double().requires_grad_()
    exact_scale = (scale if case.scaled else torch.ones_like(scale))[:routed].double().requires_grad_()
    exact_act = exact_scale[:, None] * reference.activate(exact_pre, case.activation)
    exact_dpre, exact_dscale = torch.autograd.grad(exact_act, (exact_pre, exact_scale), da[:routed].double())
    for t in (pre, da, scale):
        t[routed:] = NAN

    pre, given = view(pre), da if case.overwrite_da else view(da)
    how = {"overwrite_da": True} if case.overwrite_da else {}
    dpre, act, dscale = function(
        pre, given, ends(case.sizes), case.activation, poisoned(scale) if case.scaled else None, **how
    )
    assert (act.data_ptr() == given.data_ptr()) == case.overwrite_da or act.numel() == 0
    assert_close(dpre[:routed], exact_dpre, case.dtype, 2.0)
    assert_close(act[:routed], exact_act.detach(), case.dtype, 2.0)
    assert_close(dscale[:routed], exact_dscale, torch.float32, 2.0)  # not rounded to the rows' dtype
    assert dscale.dtype == torch.float32
    assert all(is_zero(t[routed:]) for t in (dpre, act, dscale)), "rows past the last offset are not zero"
