"""The public operations on the triton backend: their gradients, and that wrong arguments reach no kernel."""

from __future__ import annotations

import pytest
import test_expert_ffn as layer_tests
import test_ops
import torch
from row_cases import NAN, columns_first, is_zero
from torch import Tensor
from triton_cases import DEVICE, DTYPES, FEW, assert_close, check_wgrad, ends, forced, poisoned, random

from openlm_moe_kernels import (
    activation_backward,
    combine_topk,
    expert_ffn,
    gather_rows,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    reference,
    route_plan,
)

TRITON = {"backend": "triton"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_two_passes_through_a_product(activation: str | None, dtype: torch.dtype, launches) -> None:
    """Tail rows of every input and of the gradient hold NaN; dX's are zero, and so is what an empty group gets."""
    offsets, routed, rows = ends((20, 0, 33)), 53, 60
    trans_w = dtype == torch.float16
    width = 80 if activation == "swiglu" else 40
    x, w, dy = (random(*s, dtype=dtype, scale=0.3) for s in ((rows, 36), (3, 36, width), (rows, 40)))
    scale = torch.rand(rows, device=DEVICE) + 0.5
    exact = [t.double().requires_grad_() for t in (x[:routed], w, scale[:routed])]
    halves = [a @ exact[1][e] for e, a in zip((0, 2), exact[0].split((20, 33)), strict=True)]
    expected = exact[2][:, None] * reference.activate(torch.cat(halves), activation)
    gradients = torch.autograd.grad(expected, exact, dy[:routed].double())
    for t in (x, scale, dy):
        t[routed:] = NAN

    stored = columns_first(w.mT.contiguous()) if trans_w else poisoned(w)
    leaves = [t.requires_grad_() for t in (poisoned(x), stored, scale)]
    with forced(FEW):
        for cycle in (1, 2):
            y = grouped_gemm(*leaves[:2], offsets, trans_w=trans_w, activation=activation, row_scale=scale, **TRITON)
            y.backward(columns_first(dy))
            assert_close(y[:routed].detach(), expected.detach(), dtype, 4.0)
            dx, dw, dscale = (t.grad for t in leaves)
            assert_close(dx[:routed], cycle * gradients[0], dtype, 8.0)
            assert_close(dw.mT if trans_w else dw, cycle * gradients[1], dtype, 8.0)
            assert_close(dscale[:routed], cycle * gradients[2], dtype, 8.0)
            assert is_zero(y[routed:]) and is_zero(dx[routed:]) and is_zero(dscale[routed:]) and is_zero(dw[1])
    assert launches["_wgrad"] == launches["_act_backward"] == 2


def test_gathered_rows_get_the_sum_of_their_gradients() -> None:
    gather = torch.tensor([4, 0, 0, 2, 4, 0, 1], device=DEVICE)
    x, w = random(5, 20, dtype=torch.float32), random(2, 20, 24, dtype=torch.float32)
    dy, offsets = random(7, 24, dtype=torch.float32), ends((2, 4))
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    exact = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.cat([exact[0][gather[:2]] @ exact[1][0], exact[0][gather[2:6]] @ exact[1][1]])
    expected.backward(dy[:6].double())
    grouped_gemm(*leaves, offsets, gather=gather, **TRITON).backward(dy)
    for t, e in zip(leaves, exact, strict=True):
        assert_close(t.grad, e.grad, torch.float32, 2.0)
    assert is_zero(leaves[0].grad[[1, 3]])  # read by a row past the last offset, and by none


@pytest.mark.parametrize("trans_w", [False, True])
def test_dgrad_is_the_product_with_the_transposed_weights(trans_w: bool) -> None:
    dy, w, offsets = random(60, 40, dtype=torch.float16), random(3, 36, 40, dtype=torch.float16), ends((20, 0, 33))
    dy[53:] = NAN
    stored = w.mT.contiguous() if trans_w else w
    with forced(FEW):
        dx = grouped_gemm_dgrad(poisoned(dy), poisoned(stored), offsets, trans_w=trans_w, **TRITON)
    assert_close(dx, reference.grouped_gemm(dy.double(), w.double(), offsets, trans_w=True), torch.float16)
    assert is_zero(dx[53:])


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gathered", ["", "x"])
@pytest.mark.parametrize("trans_w", [False, True])
def test_public_wgrad(trans_w: bool, gathered: str, out_dtype: torch.dtype | None) -> None:
    def function(x: Tensor, dy: Tensor, offsets: Tensor, gather_x: Tensor | None = None, out: Tensor | None = None):
        result = grouped_gemm_wgrad(
            x,
            dy,
            offsets,
            trans_w=trans_w,
            gather=gather_x,
            out=out if out is None or not trans_w else out.mT,
            **TRITON,
        )
        if out is not None:
            return out
        return result.mT if trans_w else result

    with forced(FEW):
        check_wgrad((20, 0, 33), 7, 36, 40, torch.bfloat16, gathered, out_dtype, function)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_to_experts_and_back(dtype: torch.dtype, weighted: bool, launches) -> None:
    """Forward and backward of combine(gather(x)), twice; slots without an expert have NaN weights."""
    ids = torch.randint(0, 5, (40, 3), device=DEVICE)  # expert 4 does not exist
    has_expert, plan = ids < 4, route_plan(ids, 4)
    x, dout, weights = random(40, 33, dtype=dtype), random(40, 33, dtype=dtype), torch.rand(40, 3, device=DEVICE) + 0.5
    exact = [t.double().requires_grad_() for t in (x, weights)]
    factors = torch.where(has_expert, exact[1] ** 2 if weighted else 1.0, 0.0)
    expected = exact[0] * factors.sum(1, keepdim=True)
    expected.backward(dout.double())
    weights = poisoned(weights.masked_fill(~has_expert, NAN))
    leaves = [poisoned(x).requires_grad_(), weights.requires_grad_()]
    for cycle in (1, 2):
        used = leaves[1] if weighted else None
        out = combine_topk(gather_rows(leaves[0], plan, used, **TRITON), used, plan, **TRITON)
        out.backward(columns_first(dout))
        assert_close(out.detach(), expected.detach(), dtype, 4.0)
        assert_close(leaves[0].grad, cycle * exact[0].grad, dtype, 4.0)
        if weighted:
            assert_close(leaves[1].grad, cycle * exact[1].grad, dtype, 4.0)
            assert is_zero(leaves[1].grad[~has_expert])
    assert launches["_combine_topk_dweights"] == (4 if weighted else 0)


def wrong_calls() -> dict[str, object]:
    """The calls that the other backends refuse, without those about another device than this one's."""
    return {name: call for name, call in test_ops.WRONG.items() if "is on" not in name and "cannot run" not in name}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="these calls are on the CPU")
@pytest.mark.parametrize("message", wrong_calls())
def test_wrong_arguments_launch_nothing(message: str, nothing_launched) -> None:
    """`auto` is triton in the interpreter."""
    with pytest.raises(ValueError, match=f"^{message}"):
        wrong_calls()[message]()


@pytest.mark.parametrize("message", [m for m in layer_tests.WRONG if not m.startswith(("backend", "plan"))])
def test_wrong_arguments_of_the_layer_launch_nothing(message: str, launches, nothing_launched) -> None:
    plan = route_plan(torch.zeros(6, 2, dtype=torch.int64, device=DEVICE), 3)
    launches.clear()
    arguments = {"x": (6, 4), "weights": (6, 2), "w1": (3, 4, 5), "w2": (3, 5, 4)}
    arguments = {name: torch.zeros(shape, device=DEVICE) for name, shape in arguments.items()}
    for name, value in layer_tests.WRONG[message].items():
        on_device = isinstance(value, Tensor) and value.device.type == "cpu"
        arguments[name] = value.to(DEVICE) if on_device else value
    tensors = [arguments.pop(name) for name in ("x", "weights", "w1", "w2")]
    with pytest.raises(ValueError, match=f"^{message}"):
        expert_ffn(*tensors, plan, **arguments, **TRITON)


def test_float64_is_refused_by_name(nothing_launched) -> None:
    x, w, offsets = (t.to(DEVICE) for t in (torch.zeros(4, 3).double(), torch.zeros(1, 3, 5).double(), ends((4,))))
    calls = (
        lambda: grouped_gemm(x, w, offsets, **TRITON),
        lambda: grouped_gemm_wgrad(x, x, offsets, **TRITON),
        lambda: grouped_gemm_wgrad(x, x, offsets, out=torch.zeros(1, 3, 3).double().to(DEVICE), **TRITON),
        lambda: activation_backward(x, x, offsets, activation="gelu", **TRITON),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^backend 'triton' cannot run: .* not torch.float64"):
            call()
