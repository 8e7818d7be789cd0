"""The same MoE feed-forward, written several ways, and the dense feed-forward of the same FLOPs.

Every contender is a function of x (T, D), weights (T, K) and expert ids (T, K), with parameters of its own. Shape
letters: T tokens, K top-k, D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe.bench.shapes import Shape
from openlm_moe_kernels import expert_ffn, route_plan

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def activate(pre: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return F.gelu(pre, approximate="tanh")
    gate, up = pre.chunk(2, dim=-1)
    return F.silu(gate) * up


def parameter(*shape: int, fan_in: int, dtype: torch.dtype, device: str) -> Tensor:
    return (torch.randn(*shape, device=device, dtype=dtype) * fan_in**-0.5).requires_grad_()


def routing(shape: Shape, kind: str, device: str) -> tuple[Tensor, Tensor]:
    """Weights (T, K) and ids (T, K): each expert equally often, or expert e in proportion to 1 / (e + 1)."""
    logits = torch.randn(shape.tokens, shape.experts, device=device)
    if kind == "skewed":
        logits = (
            torch.empty_like(logits).exponential_().log().neg()
            - torch.arange(1, shape.experts + 1, device=device).float().log()
        )
    else:
        token = torch.arange(shape.tokens, device=device)[:, None]
        slots = (token * shape.top_k + torch.arange(shape.top_k, device=device)) % shape.experts
        logits = logits.scatter(1, slots, 10 + torch.rand(slots.shape, device=device))
    weights, ids = logits.softmax(-1).topk(shape.top_k)
    return weights.requires_grad_(), ids


def dense(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Layer, list[Tensor]]:
    """The floor: one dense feed-forward of K times the hidden size, ignoring the routing."""
    k = shape.top_k
    w1 = parameter(k * shape.width, shape.dim, fan_in=shape.dim, dtype=dtype, device=device)
    w2 = parameter(shape.dim, k * shape.hidden, fan_in=shape.hidden, dtype=dtype, device=device)
    return lambda x, weights, ids: F.linear(activate(F.linear(x, w1), shape.activation), w2), [w1, w2]


def ours(shape: Shape, dtype: torch.dtype, device: str, backend: str = "auto") -> tuple[Layer, list[Tensor]]:
    w1, w2 = _stacks(shape, dtype, device)

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        plan = route_plan(ids, shape.experts)
        return expert_ffn(x, weights, w1, w2, plan, activation=shape.activation, backend=backend)

    return layer, [w1, w2]


def loop(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Layer, list[Tensor]]:
    """Expert by expert, as a model file would."""
    w1, w2 = _stacks(shape, dtype, device)

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(shape.experts):
            tokens, slot = (ids == e).nonzero(as_tuple=True)
            y = activate(x[tokens] @ w1[e], shape.activation) @ w2[e]
            out = out.index_add(0, tokens, y * weights[tokens, slot, None].to(y.dtype))
        return out

    return layer, [w1, w2]


def grouped_mm(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Layer, list[Tensor]]:
    """torch.nn.functional.grouped_mm between gathers."""
    w1, w2 = _stacks(shape, dtype, device)

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        flat, order = ids.flatten().sort(stable=True)
        offsets = torch.searchsorted(flat, torch.arange(shape.experts, device=flat.device), right=True).int()
        tokens = order // shape.top_k
        y = F.grouped_mm(activate(F.grouped_mm(x[tokens], w1, offs=offsets), shape.activation), w2, offs=offsets)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y)

    return layer, [w1, w2]


def transformers_grouped_mm(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Layer, list[Tensor]]:
    """The fastest experts implementation of transformers 5, on weights in its own layout."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    gated = shape.activation == "swiglu"
    up = parameter(shape.experts, shape.width, shape.dim, fan_in=shape.dim, dtype=dtype, device=device)
    down = parameter(shape.experts, shape.dim, shape.hidden, fan_in=shape.hidden, dtype=dtype, device=device)
    module = SimpleNamespace(
        num_experts=shape.experts,
        has_gate=gated,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
        down_proj=down,
        act_fn=lambda pre: activate(pre, "gelu"),
        _apply_gate=lambda pre: activate(pre, "swiglu"),
        **{"gate_up_proj" if gated else "up_proj": up},
    )
    forward = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return lambda x, weights, ids: forward(module, x, ids, weights.to(x.dtype)), [up, down]


def peers() -> dict[str, Callable[[Shape, torch.dtype, str], tuple[Layer, list[Tensor]]]]:
    """The other implementations that can run here, by name."""
    found = {"F.grouped_mm": grouped_mm, "loop": loop}
    if importlib.util.find_spec("transformers"):
        found["transformers grouped_mm"] = transformers_grouped_mm
    return found


def _stacks(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return (
        parameter(shape.experts, shape.dim, shape.width, fan_in=shape.dim, dtype=dtype, device=device),
        parameter(shape.experts, shape.hidden, shape.dim, fan_in=shape.hidden, dtype=dtype, device=device),
    )
