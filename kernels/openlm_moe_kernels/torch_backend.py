"""The torch backend: torch's own operations, on any device.

On a CPU the feed-forward is `cpu_ffn`, blocked for the cache. On a GPU a product is torch.nn.functional.grouped_mm
where that is right and does not wait on the device, else one product a group, which waits for the offsets. Shape
letters as in `backend.py`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe_kernels import composition, cpu_ffn, reference
from openlm_moe_kernels.cpu_activation import BlockedActivation
from openlm_moe_kernels.formulas import accumulation, activate
from openlm_moe_kernels.plan import RoutePlan, groups
from openlm_moe_kernels.reference import combine_topk_dweights, tile_map, tile_map_shape, unsupported

__all__ = ["combine_topk_dweights", "tile_map", "tile_map_shape", "unsupported"]


def grouped_gemm(
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
    w = w.mT if trans_w else w
    y = _products(x if gather is None else x.index_select(0, gather), w, offsets)
    if activation is None and row_scale is None:
        return y
    scale = torch.ones_like(y[:, 0]) if row_scale is None else row_scale
    scale = torch.where(_valid(y.shape[0], offsets), scale.to(accumulation(y.dtype)), 0.0)[:, None]
    if y.device.type != "cpu":
        return (activate(y, activation) * scale).to(y.dtype)
    out = y.new_empty(y.shape[0], y.shape[1] // 2 if activation == "swiglu" else y.shape[1])
    BlockedActivation(activation, out.shape[1], y.dtype).forward(y, out)
    return out if row_scale is None else (out * scale).to(y.dtype)


def grouped_gemm_wgrad(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    *,
    trans_w: bool = False,
    gather: Tensor | None = None,
    out: Tensor | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    x = x if gather is None else x.index_select(0, gather)
    a, b = (dy, x) if trans_w else (x, dy)
    if out is None and _has_grouped_mm(a, b):
        dw = F.grouped_mm(a.t(), b, offs=offsets)
        empty_E = offsets == F.pad(offsets[:-1], (1, 0))
        return dw.masked_fill_(empty_E[:, None, None], 0)
    if out is None:
        out = a.new_zeros(offsets.shape[0], a.shape[1], b.shape[1])
    a, b = _packed(a.to(out.dtype)), b.to(out.dtype)
    for e, start, stop in groups(offsets):
        out[e].addmm_(a[start:stop].t(), b[start:stop])
    return out


def gather_rows(x: Tensor, plan: RoutePlan, scale_TK: Tensor | None = None) -> Tensor:
    rows = x.index_select(0, plan.tokens_N)
    if scale_TK is not None:
        scale = scale_TK.reshape(-1)[plan.order_N, None]
        rows = (rows * scale.to(accumulation(x.dtype))).to(x.dtype)
    return _zero_tail(rows, plan.offsets_E)


def combine_topk(y: Tensor, weights_TK: Tensor | None, plan: RoutePlan) -> Tensor:
    if y.device.type != "cpu":
        return reference.combine_topk(y, weights_TK, plan)
    if int(plan.offsets_E[-1]) < plan.num_rows:
        y = _zero_tail(y.clone(), plan.offsets_E)
        if weights_TK is not None:
            weights_TK = torch.where(reference.valid_slots(plan).view(weights_TK.shape), weights_TK, 0.0)
    if weights_TK is None:
        return cpu_ffn.sum_slots(y, plan)
    # The sum takes weights in the rows' dtype: 16-bit rows are widened rather than the weights rounded.
    return cpu_ffn.sum_slots(y.to(accumulation(y.dtype)), plan, weights_TK).to(y.dtype)


def act_backward(
    pre: Tensor, da: Tensor, offsets: Tensor, activation: str | None, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if pre.device.type != "cpu":
        return reference.act_backward(pre, da, offsets, activation, row_scale)
    end = int(offsets[-1])
    blocked = BlockedActivation(activation, da.shape[1], pre.dtype)
    dpre, act, dscale = torch.zeros_like(pre), torch.zeros_like(da), pre.new_zeros(pre.shape[0], dtype=blocked.dtype)
    blocked.backward(pre[:end], da[:end].clone(), act[:end], dpre[:end], dscale[:end])
    if row_scale is not None:
        dpre[:end].mul_(row_scale[:end, None].to(blocked.dtype))
        act[:end].mul_(row_scale[:end, None].to(blocked.dtype))
    return dpre, act, dscale


def ffn_forward(
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
    if x.device.type == "cpu":
        return cpu_ffn.ffn_forward(x, weights_TK, w1, w2, plan, activation, keep_pre)
    ops = sys.modules[__name__]
    return composition.ffn_forward(ops, x, weights_TK, w1, w2, plan, activation, keep_pre, allow_tf32)


def ffn_backward(
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
    if x.device.type == "cpu":
        return cpu_ffn.ffn_backward(dout, x, weights_TK, w1, w2, pre, plan, activation, needs)
    ops = sys.modules[__name__]
    return composition.ffn_backward(ops, dout, x, weights_TK, w1, w2, pre, plan, activation, needs, allow_tf32)


def _products(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x_e w_e for each group, zeros in the tail."""
    if _has_grouped_mm(x, w):
        return _zero_tail(F.grouped_mm(x, w, offs=offsets), offsets)
    x = _packed(x)
    out = x.new_empty(x.shape[0], w.shape[2])
    end = 0
    for e, start, end in groups(offsets):
        torch.mm(x[start:end], w[e], out=out[start:end])
    out[end:].zero_()
    return out


def _packed(t: Tensor) -> Tensor:
    """A product's left operand. oneDNN reads one element past a 16-bit row of odd length unless the next row follows at
    once, and multiplies it by zero; between the rows of a view that element may be NaN."""
    return t.contiguous() if t.itemsize == 2 and t.device.type == "cpu" else t


def _has_grouped_mm(x: Tensor, w: Tensor) -> bool:
    """Where torch has a grouped GEMM without a wait: bf16 on sm_90 and sm_100, rows of multiples of 16 bytes."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10) and _aligned(x) and _aligned(w)


def _aligned(t: Tensor) -> bool:
    strides = sorted(t.stride()[-2:])
    return strides[0] == 1 and strides[1] % 8 == 0 and t.data_ptr() % 16 == 0


def _valid(rows: int, offsets: Tensor) -> Tensor:
    """Whether a row belongs to a group, bool (rows,), found without a wait."""
    return torch.arange(rows, device=offsets.device) < offsets[-1]


def _zero_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        rows[int(offsets[-1]) :].zero_()
        return rows
    return rows.masked_fill_(~_valid(rows.shape[0], offsets)[:, None], 0)
