"""The triton backend: what `backend.Backend` asks for, composed from the kernels in `gpu/`.

NVIDIA sm_80 and newer, AMD gfx90a and gfx942; on a CPU only in Triton's interpreter. Shape letters as in `backend.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openlm_moe_kernels.gpu import grouped_gemm as gemm
from openlm_moe_kernels.gpu.activation import act_backward
from openlm_moe_kernels.gpu.launch import interpreted
from openlm_moe_kernels.gpu.rows import combine_topk, combine_topk_dweights, gather_rows
from openlm_moe_kernels.gpu.tables import architecture_of
from openlm_moe_kernels.gpu.tiles import tile_map, tile_map_shape
from openlm_moe_kernels.gpu.wgrad import wgrad
from openlm_moe_kernels.plan import RoutePlan

__all__ = [
    "act_backward",
    "combine_topk",
    "combine_topk_dweights",
    "ffn_backward",
    "ffn_forward",
    "gather_rows",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "tile_map",
    "tile_map_shape",
    "unsupported",
]

_AMD = ("gfx90a", "gfx942")


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its kernels take float16, bfloat16 and float32, not {dtype}"
    if device.type == "cpu":
        return None if interpreted() else "the tensors are on a CPU (TRITON_INTERPRET=1 runs the kernels there, slowly)"
    if device.type != "cuda":
        return f"it has no kernels for {device.type} devices"
    if interpreted():
        return "TRITON_INTERPRET is set, and the interpreter takes CPU tensors"
    architecture = architecture_of(device)
    supported = architecture in _AMD if torch.version.hip else int(architecture.removeprefix("sm_")) >= 80
    return (
        None if supported else f"its kernels need NVIDIA sm_80 or newer, or AMD {' or '.join(_AMD)}, not {architecture}"
    )


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
    y, _ = gemm.grouped_gemm(
        x,
        w,
        offsets,
        trans_w=trans_w,
        gather=gather,
        activation=activation,
        row_scale=row_scale,
        allow_tf32=allow_tf32,
    )
    return y


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
    if trans_w:
        return wgrad(dy, x, offsets, gather_dy=gather, out=out, allow_tf32=allow_tf32)
    return wgrad(x, dy, offsets, gather_x=gather, out=out, allow_tf32=allow_tf32)


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
    offsets, tiles = plan.offsets_E, _tiles(plan)
    act, pre = gemm.grouped_gemm(
        x,
        w1,
        offsets,
        gather=plan.tokens_N,
        activation=activation,
        keep_pre=keep_pre,
        allow_tf32=allow_tf32,
        tiles=tiles,
    )
    y, _ = gemm.grouped_gemm(act, w2, offsets, allow_tf32=allow_tf32, tiles=tiles)
    return combine_topk(y, weights_TK, plan), x.new_empty(0, 0) if pre is None else pre


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
    """After SonicMoE (arXiv 2512.14080): the combine weights' gradient is <dA, A>, with A recomputed from `pre`, and
    the gradient of the output is gathered where it is loaded; no (N, D) tensor but dX before its sum over k.
    """
    offsets, tokens, tiles = plan.offsets_E, plan.tokens_N, _tiles(plan)
    dx = dweights = dw1 = dw2 = x.new_empty(0)
    da, _ = gemm.grouped_gemm(dout, w2, offsets, trans_w=True, gather=tokens, allow_tf32=allow_tf32, tiles=tiles)
    row_scale = weights_TK.reshape(-1)[plan.order_N]
    dpre, act, dscale = act_backward(pre, da, offsets, activation, row_scale, overwrite_da=True)
    if needs[1]:
        dweights = dscale[plan.inverse_N].reshape(weights_TK.shape).to(weights_TK.dtype)
    if needs[3]:
        dw2 = wgrad(act, dout, offsets, gather_dy=tokens, allow_tf32=allow_tf32)
    del da, act  # (N, F), before dX needs (N, D)
    if needs[2]:
        dw1 = wgrad(x, dpre, offsets, gather_x=tokens, allow_tf32=allow_tf32)
    if needs[0]:
        dx_rows, _ = gemm.grouped_gemm(dpre, w1, offsets, trans_w=True, allow_tf32=allow_tf32, tiles=tiles)
        dx = combine_topk(dx_rows, None, plan)
    return dx, dweights, dw1, dw2


def _tiles(plan: RoutePlan) -> Tensor:
    """The plan's tile map, made here if its maker had no use for one."""
    return plan.tiles if plan.tiles.numel() else tile_map(plan.offsets_E, plan.num_rows)
