"""Element offsets past 2^31 for every kernel, in memory that is mostly never touched.

Where a result itself is so large, the interpreter runs the last program alone; a GPU runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton_cases import DEVICE, assert_close, ends, forced, random

from openlm_moe_kernels import reference, route_plan
from openlm_moe_kernels.gpu import launch, tables
from openlm_moe_kernels.gpu.activation import act_backward
from openlm_moe_kernels.gpu.grouped_gemm import grouped_gemm
from openlm_moe_kernels.gpu.rows import combine_topk, combine_topk_dweights, gather_rows
from openlm_moe_kernels.gpu.wgrad import wgrad

HALF = torch.float16
WIDTH, ROWS = 2**16, 2**15 + 1  # a tensor of these has 2^16 elements past 2^31


@pytest.fixture(autouse=True)
def leave_memory_untouched(uninitialised_is_nan) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False


@pytest.fixture
def last_program_alone(monkeypatch) -> Iterator[None]:
    if DEVICE.type != "cpu":
        yield
        return
    from triton.runtime import interpreter

    def run_last(inner):
        def run(kernel, grid, device, arguments):
            last = [n - 1 for n in grid]

            def program_id(self, axis):
                return interpreter.TensorHandle(np.array([last[axis]], dtype=np.int32), tl.int32)

            with monkeypatch.context() as patch:
                patch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", program_id)
                inner(kernel, (1,) * len(grid), device, arguments)

        return run

    with launch.launcher(run_last):
        yield


def far(t: Tensor, stride: int) -> Tensor:
    """`t` with its outermost stride replaced."""
    strides = (stride, *t.stride()[1:])
    assert (t.shape[0] - 1) * stride > 2**31
    size = (t.shape[0] - 1) * stride + t[0].numel()
    return torch.empty(size, dtype=t.dtype, device=DEVICE).as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize("tma", [False, True])
def test_inputs_of_the_grouped_gemm(tma: bool) -> None:
    x, w = random(40, 32, dtype=HALF), random(3, 32, 48, dtype=HALF, scale=0.2)
    offsets = ends((10, 0, 28))
    expected = reference.grouped_gemm(x.double(), w.double(), offsets)
    far_x, far_w = far(x, 2**26), far(w, 2**30 + 64)
    far_inner = far(w.transpose(0, 1).contiguous(), 2**27).transpose(0, 1)
    far_columns = far(w.permute(2, 0, 1).contiguous(), 2**27).permute(1, 2, 0)
    with forced(tables.Config(32, 32, 16, 4, 1, tma=tma)):  # two steps of the inner dimension, 2^31 elements each
        assert_close(grouped_gemm(far_x, w, offsets)[0], expected, HALF)
        for far_one in (far_w, far_inner, far_columns):
            assert_close(grouped_gemm(x, far_one, offsets)[0], expected, HALF)
            gated, _ = grouped_gemm(x, far_one, offsets, activation="swiglu")
            assert torch.equal(gated, grouped_gemm(x, w, offsets, activation="swiglu")[0])
        gathered, _ = grouped_gemm(far_x, w, offsets, gather=torch.arange(39, -1, -1, device=DEVICE))
        assert_close(gathered, reference.grouped_gemm(x.double().flip(0), w.double(), offsets), HALF)
        transposed = far(x.T.contiguous(), 2**27).T  # the inner dimension is the far one
        assert_close(grouped_gemm(transposed, w, offsets)[0], expected, HALF)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_outputs_of_the_grouped_gemm(activation: str | None) -> None:
    """A single tile, named by a map of its own, at the end of outputs with more than 2^31 elements."""
    columns, rows, first = 1056, 2**21 + 40, 2**21 + 4
    assert first * columns > 2**31
    x = torch.empty(rows, 16, dtype=HALF, device=DEVICE)
    x[first:] = random(rows - first, 16, dtype=HALF)
    w = random(1, 16, columns * (2 if activation == "swiglu" else 1), dtype=HALF, scale=0.25)
    one_tile = torch.tensor([[1, 0, 0, 0], [0, first, first + 32, 0]], dtype=torch.int32, device=DEVICE)
    tiles = torch.empty(4 * rows // 32, 4, dtype=torch.int32, device=DEVICE)
    tiles[:2] = one_tile  # the section for 32 rows a tile is the first
    with forced(tables.Config(32, 256, 16, 4, 1)):
        y, pre = grouped_gemm(x, w, ends((rows,)), activation=activation, keep_pre=bool(activation), tiles=tiles)
    expected_pre = x[first : first + 32].double() @ w[0].double()
    expected = reference.activate(expected_pre, activation)
    assert_close(y[first : first + 32], expected, HALF, 4.0)
    if pre is not None:
        assert_close(pre[first : first + 32], expected_pre, HALF)


def test_wgrad() -> None:
    x, dy, offsets = random(40, 32, dtype=HALF), random(40, 48, dtype=HALF), ends((10, 0, 28))
    expected = reference.grouped_gemm_wgrad(x.double(), dy.double(), offsets)
    order = torch.arange(39, -1, -1, device=DEVICE)
    flipped = reference.grouped_gemm_wgrad(x.double().flip(0), dy.double(), offsets)
    with forced(tables.Config(32, 32, 32, 4, 1)):
        assert_close(wgrad(far(x, 2**26), dy, offsets), expected, HALF, 2.0)
        assert_close(wgrad(x, far(dy, 2**26), offsets), expected, HALF, 2.0)
        assert_close(wgrad(far(x, 2**26), dy, offsets, gather_x=order), flipped, HALF, 2.0)
        columns = far(x.T.contiguous(), 2**27).T
        assert_close(wgrad(columns, dy, offsets), expected, HALF, 2.0)
        assert_close(wgrad(x, far(dy.T.contiguous(), 2**26).T, offsets), expected, HALF, 2.0)
        zeros = torch.zeros_like(expected, dtype=HALF)
        experts = far(zeros, 2**30 + 64)
        assert_close(wgrad(x, dy, offsets, out=experts), expected, HALF, 2.0)
        rows = far(zeros.transpose(0, 1).contiguous(), 2**27).transpose(0, 1)
        assert_close(wgrad(x, dy, offsets, out=rows), expected, HALF, 2.0)


def test_inputs_of_the_row_kernels() -> None:
    ids = torch.randint(0, 4, (20, 2), device=DEVICE)  # expert 3 does not exist
    plan = route_plan(ids, 3)
    x, y, weights = random(20, 40, dtype=HALF), random(40, 40, dtype=HALF), torch.rand(20, 2, device=DEVICE)
    far_x, far_y = far(x, 2**27), far(y, 2**26)
    assert torch.equal(gather_rows(far_x, plan, weights), gather_rows(x, plan, weights))
    assert torch.equal(combine_topk(far_y, weights, plan), combine_topk(y, weights, plan))
    near = combine_topk_dweights(x, y, plan)
    assert torch.equal(combine_topk_dweights(far_x, y, plan), near)
    assert torch.equal(combine_topk_dweights(x, far_y, plan), near)
    assert near.count_nonzero() > 20


def test_outputs_of_the_row_kernels(last_program_alone) -> None:
    row = random(1, WIDTH, dtype=HALF)
    plan = route_plan(torch.zeros(ROWS, 1, dtype=torch.int64, device=DEVICE), 1)
    rows = row.expand(ROWS, WIDTH)
    for out in (gather_rows(rows, plan), combine_topk(rows, None, plan)):
        assert torch.equal(out[-1, -1024:], row[0, -1024:])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_inputs_of_the_activation_backward(activation: str) -> None:
    pre, da = random(20, 40 if activation == "gelu" else 80, dtype=HALF), random(20, 40, dtype=HALF)
    near = act_backward(pre, da, ends((18,)), activation)
    for arguments in ((far(pre, 2**27), da), (pre, far(da, 2**27)), (far(pre.T.contiguous(), 2**26).T, da)):
        ours = act_backward(*arguments, ends((18,)), activation)
        assert all(torch.equal(a, b) for a, b in zip(ours, near, strict=True))
    assert all(t.count_nonzero() for t in near)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_outputs_of_the_activation_backward(activation: str, last_program_alone) -> None:
    width = WIDTH if activation == "gelu" else 2 * WIDTH
    pre, da = random(1, width, dtype=HALF), random(1, WIDTH, dtype=HALF)
    expected = reference.act_backward(pre.double(), da.double(), ends((1,)), activation)
    dpre, act, dscale = act_backward(pre.expand(ROWS, width), da.expand(ROWS, WIDTH), ends((ROWS,)), activation)
    assert_close(dpre[-1:], expected[0], HALF, 2.0)
    assert_close(act[-1:], expected[1], HALF, 2.0)
    assert_close(dscale[-1:], expected[2], torch.float32, 4.0)
