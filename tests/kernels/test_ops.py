"""The parts of the layer, each against its formula in float64, on both plain backends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import (
    BACKENDS,
    DTYPES,
    GROUPS,
    LAYOUTS,
    ODD_SIZES,
    WITH_FIXTURES,
    act,
    assert_close,
    ends,
    leaves,
    loop_products,
)
from torch import Tensor

from openlm_moe_kernels import (
    activation,
    activation_backward,
    combine_topk,
    gather_rows,
    gemm,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    route_plan,
    rows,
)

pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")
NAN = float("nan")


@dataclass(frozen=True)
class Product:
    sizes: tuple[int, ...]
    tail: int
    inner: int
    outer: int
    dtype: torch.dtype = torch.float64
    backend: str = "torch"
    trans_w: bool = False
    gathered: bool = False
    activation: str | None = None
    scaled: bool = False
    layout: str = "contiguous"


def check_product(case: Product) -> None:
    """Forward, input gradient and weight gradient of one product; tail rows of every operand are NaN."""
    n_rows, valid = sum(case.sizes) + case.tail, sum(case.sizes)
    view = LAYOUTS[case.layout]
    n_source = n_rows + 3 if case.gathered else n_rows
    x, dy = torch.randn(n_source, case.inner).to(case.dtype), torch.randn(n_rows, case.outer).to(case.dtype)
    dy[valid:] = NAN
    gather = None
    if case.gathered:
        gather = torch.randint(0, max(n_rows, 1), (n_rows,))
        gather[valid:] = n_rows
        x[n_rows:] = NAN
    else:
        x[valid:] = NAN
    rows_of_x = x if gather is None else x[gather]
    w = (torch.randn(len(case.sizes), case.inner, case.outer, dtype=torch.float64) * case.inner**-0.5).to(case.dtype)
    scale = torch.rand(n_rows, dtype=torch.promote_types(case.dtype, torch.float32)) if case.scaled else None
    if scale is not None:
        scale[valid:] = NAN
    stored = view(w.mT.contiguous() if case.trans_w else w)
    how = {"trans_w": case.trans_w, "backend": case.backend}

    y = grouped_gemm(
        view(x), stored, ends(case.sizes), gather=gather, activation=case.activation, row_scale=scale, **how
    )
    want = loop_products(rows_of_x.double(), w.double(), case.sizes, case.tail, case.activation)
    if scale is not None:
        want[:valid] *= scale[:valid, None].double()
    assert y.dtype == case.dtype
    assert_close("y", y, want, case.dtype)
    assert y[valid:].count_nonzero() == 0  # NaN counts as nonzero

    dx = grouped_gemm_dgrad(view(dy), stored, ends(case.sizes), **how)
    assert_close("dx", dx, loop_products(dy.double(), w.mT.double(), case.sizes, case.tail), case.dtype)
    assert dx[valid:].count_nonzero() == 0

    dw = grouped_gemm_wgrad(view(x), view(dy), ends(case.sizes), gather=gather, **how)
    want = [
        a.mT @ b for a, b in zip(*(t[:valid].double().split(list(case.sizes)) for t in (rows_of_x, dy)), strict=True)
    ]
    want = torch.stack(want)
    assert_close("dw", dw, want.mT if case.trans_w else want, case.dtype)
    for e, size in enumerate(case.sizes):
        assert size > 0 or dw[e].count_nonzero() == 0

    out = torch.full_like(dw, 2, dtype=torch.float32 if case.dtype == torch.bfloat16 else case.dtype)
    assert grouped_gemm_wgrad(view(x), view(dy), ends(case.sizes), gather=gather, out=out, **how) is out
    assert_close("dw added to out", out, (want.mT if case.trans_w else want) + 2, case.dtype)


sizes = st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=1, max_size=6).map(tuple)
columns = st.one_of(st.sampled_from(ODD_SIZES), st.integers(1, 80))
products = st.builds(
    Product,
    sizes=sizes,
    tail=st.sampled_from((0, 0, 1, 40)),
    inner=columns,
    outer=columns.map(lambda n: n + n % 2),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
    trans_w=st.booleans(),
    gathered=st.booleans(),
    activation=st.sampled_from((None, "gelu", "swiglu")),
    scaled=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
)


@settings(max_examples=80, derandomize=True, **WITH_FIXTURES)
@given(case=products)
def test_any_product(case: Product) -> None:
    check_product(case)


@pytest.mark.slow
@settings(max_examples=2000, **WITH_FIXTURES)
@given(case=products)
def test_any_product_at_length(case: Product) -> None:
    check_product(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups: str, backend: str) -> None:
    sizes, tail = GROUPS[groups]
    check_product(Product(sizes, tail, 24, 20, torch.float32, backend, activation="swiglu", scaled=True, gathered=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", ODD_SIZES)
def test_odd_sizes(size: int, backend: str) -> None:
    check_product(Product((9, 0, 2), 2, size, 2 * size, torch.float32, backend, layout="poisoned"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_two_billion_elements(backend: str) -> None:
    """A10, A11: row and group offsets are counted in 64 bits. The memory between the rows is never touched."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    far = 2**30
    x = torch.empty(3 * far + 8, dtype=torch.bfloat16).as_strided((4, 8), (far, 1))
    w = torch.empty(2 * far + 48, dtype=torch.bfloat16).as_strided((3, 8, 6), (far, 6, 1))
    x.copy_(torch.randn(4, 8))
    w.copy_(torch.randn(3, 8, 6))
    y = grouped_gemm(x, w, ends((1, 1, 2)), backend=backend)
    assert_close("y", y, loop_products(x.double(), w.double(), (1, 1, 2), 0), torch.bfloat16)
    dw = grouped_gemm_wgrad(x, y, ends((1, 1, 2)), backend=backend)
    assert_close("dw", dw[2], x[2:].double().mT @ y[2:].double(), torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    tokens: int
    top_k: int
    experts: int
    dim: int
    dtype: torch.dtype
    backend: str
    layout: str


def check_rows(case: Rows) -> None:
    """Gather and combine with NaN wherever a slot without an expert could be read."""
    ids = torch.randint(0, case.experts + 1, (case.tokens, case.top_k))
    plan, view = route_plan(ids, case.experts), LAYOUTS[case.layout]
    valid, is_slot = int(plan.offsets_E[-1]), (ids < case.experts)
    wide = torch.promote_types(case.dtype, torch.float32)
    x, weights = torch.randn(case.tokens, case.dim).to(case.dtype), torch.rand(case.tokens, case.top_k, dtype=wide)
    y = torch.randn(plan.num_rows, case.dim).to(case.dtype)
    y[valid:] = NAN
    weights[~is_slot] = NAN

    gathered = gather_rows(view(x), plan, backend=case.backend)
    assert torch.equal(gathered[:valid], x[plan.tokens_N[:valid]])
    assert gathered[valid:].count_nonzero() == 0
    scaled = gather_rows(view(x), plan, weights, backend=case.backend)
    want = x[plan.tokens_N].double() * weights.flatten()[plan.order_N, None].double()
    assert_close("scaled rows", scaled[:valid], want[:valid], case.dtype)
    assert scaled[valid:].count_nonzero() == 0

    y_TKD = torch.where(is_slot.flatten()[:, None], y[plan.inverse_N].double(), 0).view(*ids.shape, case.dim)
    combined = combine_topk(view(y), weights, plan, backend=case.backend)
    assert_close("combined", combined, (y_TKD * weights.nan_to_num(0)[..., None].double()).sum(1), case.dtype)
    assert_close("summed", combine_topk(view(y), None, plan, backend=case.backend), y_TKD.sum(1), case.dtype)
    dots = rows._dot(view(x), view(y), plan.tensors(), case.top_k, case.backend)
    assert dots.dtype == wide
    assert_close("dots", dots, (y_TKD * x[:, None].double()).sum(-1), case.dtype)


@settings(max_examples=60, derandomize=True, **WITH_FIXTURES)
@given(
    case=st.builds(
        Rows,
        tokens=st.integers(0, 40),
        top_k=st.integers(1, 4),
        experts=st.integers(1, 5),
        dim=columns,
        dtype=st.sampled_from(DTYPES),
        backend=st.sampled_from(BACKENDS),
        layout=st.sampled_from(sorted(LAYOUTS)),
    )
)
def test_any_rows(case: Rows) -> None:
    check_rows(case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_then_combine_is_the_identity(backend: str) -> None:
    """A3: for counts 0, 1, 7, 8 and 9 with padding after them."""
    counts = (0, 1, 7, 8, 9)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([*counts, 5]))[torch.randperm(30)]
    plan, x = route_plan(ids, 5), torch.randn(30, 12)
    back = combine_topk(gather_rows(x, plan, backend=backend), None, plan, backend=backend)
    assert plan.counts_E.tolist() == list(counts)
    assert torch.equal(back, torch.where((ids < 5)[:, None], x, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_sums_in_float32(backend: str, dtype: torch.dtype) -> None:
    """1 + 64 * 2^-10 is lost when each sum is rounded to bfloat16 (float16: 2^-13)."""
    small = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-13
    y = torch.full((65, 32), small, dtype=dtype)
    y[0] = 1
    plan = route_plan(torch.zeros(1, 65, dtype=torch.int64), 1)
    want = torch.tensor(1 + 64 * small, dtype=dtype)
    for weights in (None, torch.ones(1, 65)):
        assert torch.equal(combine_topk(y, weights, plan, backend=backend), want.expand(1, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_backward(backend: str, name: str | None, dtype: torch.dtype) -> None:
    sizes, tail, hidden = (0, 30, 2, 0, 7), 4, 24
    pre = (3 * torch.randn(43, hidden * (2 if name == "swiglu" else 1))).to(dtype)
    da, scale = torch.randn(43, hidden).to(dtype), torch.rand(43)
    for t in (pre, da, scale):
        t[39:] = NAN
    exact, s = leaves(pre[:39].double(), scale[:39].double())
    a = s[:, None] * act(exact, name)
    want_dpre, want_dscale = torch.autograd.grad(a, (exact, s), da[:39].double())
    for row_scale in (scale, None):
        given = da.clone()
        dpre, out, dscale = activation_backward(
            pre, given, ends(sizes), activation=name, row_scale=row_scale, backend=backend
        )
        assert torch.equal(given[:39], da[:39])
        unscaled = 1.0 if row_scale is not None else scale[:39, None].double()
        assert_close("dpre", dpre[:39], want_dpre / unscaled, dtype)
        assert_close("act", out[:39], a.detach() / unscaled, dtype)
        assert_close("dscale", dscale[:39], want_dscale, dtype)
        assert dscale.dtype == torch.promote_types(dtype, torch.float32)
        assert sum(t[39:].count_nonzero() for t in (dpre, out, dscale)) == 0
    assert tail == 43 - sum(sizes)


def differentiable(backend: str) -> dict[str, tuple]:
    """Every differentiable function with its float64 inputs."""
    offsets, gather = ends((2, 0, 3)), torch.tensor([0, 2, 2, 3, 0, 1])
    plan = route_plan(torch.tensor([[0, 2], [3, 1], [2, 0]]), 3)
    x, w, scale, dy = (torch.randn(*s, dtype=torch.float64) for s in ((6, 4), (3, 4, 6), (6,), (6, 6)))
    x_TD, s_TK, y_ND = (torch.randn(*s, dtype=torch.float64) for s in ((3, 4), (3, 2), (6, 4)))
    how = {"backend": backend}
    return {
        "grouped_gemm": (lambda x, w: grouped_gemm(x, w, offsets, **how), x, w),
        "grouped_gemm, gathered": (lambda x, w: grouped_gemm(x, w, offsets, gather=gather, **how), x[:4], w),
        "grouped_gemm, trans_w": (lambda x, w: grouped_gemm(x, w, offsets, trans_w=True, **how), dy, w),
        "grouped_gemm, scaled": (lambda x, w, s: grouped_gemm(x, w, offsets, row_scale=s, **how), x, w, scale),
        "grouped_gemm, gelu": (lambda x, w: grouped_gemm(x, w, offsets, activation="gelu", **how), x, w),
        "grouped_gemm, swiglu": (
            lambda x, w, s: grouped_gemm(x, w, offsets, activation="swiglu", row_scale=s, gather=gather, **how),
            x[:4],
            w,
            scale,
        ),
        "grouped_gemm_dgrad": (lambda dy, w: grouped_gemm_dgrad(dy, w, offsets, **how), dy, w),
        "grouped_gemm_wgrad": (lambda x, dy: grouped_gemm_wgrad(x, dy, offsets, **how), x, dy),
        "grouped_gemm_wgrad, gathered": (
            lambda x, dy: grouped_gemm_wgrad(x, dy, offsets, trans_w=True, gather=gather, **how),
            x[:4],
            dy,
        ),
        "gather_rows": (lambda x: gather_rows(x, plan, **how), x_TD),
        "gather_rows, scaled": (lambda x, s: gather_rows(x, plan, s, **how), x_TD, s_TK),
        "combine_topk": (lambda y: combine_topk(y, None, plan, **how), y_ND),
        "combine_topk, weighted": (lambda y, s: combine_topk(y, s, plan, **how), y_ND, s_TK),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", differentiable("torch"))
def test_gradients(name: str, backend: str) -> None:
    function, *inputs = differentiable(backend)[name]
    assert torch.autograd.gradcheck(function, leaves(*inputs))
    if "gelu" not in name and "swiglu" not in name and "scaled" not in name.split("grouped_gemm", 1)[-1]:
        assert torch.autograd.gradgradcheck(function, leaves(*inputs))


def operators() -> dict[str, tuple]:
    """Every operator with its arguments."""
    offsets, gather = ends((2, 0, 3)), torch.tensor([0, 2, 2, 3, 0, 1])
    plan = route_plan(torch.tensor([[0, 2], [3, 1], [2, 0]]), 3)
    x, w, scale, dy = leaves(*(torch.randn(*s) for s in ((6, 4), (3, 4, 6), (6,), (6, 6))))
    x_TD, s_TK, y_ND = leaves(*(torch.randn(*s) for s in ((3, 4), (3, 2), (6, 4))))
    plain = [t.detach() for t in (x, dy)]
    return {
        "grouped_gemm": (gemm._grouped_gemm, (x, w, offsets, gather, scale, False, "swiglu", "torch", False)),
        "grouped_gemm_wgrad": (gemm._wgrad, (x, dy, offsets, gather, True, "torch", False)),
        "into": (gemm._wgrad_into, (*plain, offsets, None, torch.zeros(3, 4, 6), False, "torch", False)),
        "activation_backward": (
            activation.activation_backward_op,
            (plain[1], plain[1][:, :3].clone(), offsets, scale.detach(), "swiglu", "torch"),
        ),
        "gather_rows": (rows._gather, (x_TD, s_TK, plan.tensors(), 2, "torch")),
        "combine_topk": (rows._combine, (y_ND, s_TK, plan.tensors(), 2, "torch")),
        "combine_topk_dweights": (rows._dot, (x_TD, y_ND, plan.tensors(), 2, "torch")),
    }


@pytest.mark.parametrize("name", operators())
def test_operators_are_registered_properly(name: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    operator, arguments = operators()[name]
    torch.library.opcheck(operator, arguments)


def x_(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


PLAN = route_plan(torch.tensor([[0, 1], [1, 2]]), 3)
I64 = torch.int64
WRONG = {
    "x has shape": lambda: grouped_gemm(x_(4), x_(2, 3, 5), ends((1, 2))),
    "x has dtype": lambda: grouped_gemm(x_(4, 3, dtype=I64), x_(2, 3, 5), ends((1, 2))),
    "w has shape": lambda: grouped_gemm(x_(4, 3), x_(2, 4, 5), ends((1, 2))),
    "w has dtype": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5, dtype=torch.float16), ends((1, 2))),
    "w is on": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5).to("meta"), ends((1, 2))),
    "w has 5 columns": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((1, 2)), activation="swiglu"),
    "offsets has shape": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((1, 2, 1))),
    "offsets has dtype": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((1, 2)).long()),
    "offsets has no group": lambda: grouped_gemm(x_(4, 3), x_(0, 3, 5), ends((1,))[:0]),
    "offsets is on": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((1, 2)).to("meta")),
    "offsets ends at 5": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((1, 4))),
    "offsets falls from 3 to 2": lambda: grouped_gemm(x_(4, 3), x_(2, 3, 5), ends((3, -1))),
    "offsets falls from 0 to -1": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((-1, 2))),
    "gather has dtype": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), gather=x_(2)),
    "gather has shape": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), gather=x_(2, 1, dtype=I64)),
    "gather holds 4": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), gather=torch.tensor([4])),
    "gather holds -1": lambda: grouped_gemm_wgrad(x_(4, 3), x_(1, 5), ends((1,)), gather=torch.tensor([-1])),
    "activation is 'relu'": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), activation="relu"),
    "row_scale has shape": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), row_scale=x_(5)),
    "row_scale has dtype": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), row_scale=x_(4, dtype=I64)),
    "backend is 'cuda'": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), backend="cuda"),
    "backend 'triton' cannot run": lambda: grouped_gemm(x_(4, 3), x_(1, 3, 5), ends((1,)), backend="triton"),
    "w has shape .* dy has 4 columns": lambda: grouped_gemm_dgrad(x_(4, 4), x_(2, 3, 5), ends((1, 2))),
    "dy has 3 rows": lambda: grouped_gemm_wgrad(x_(4, 3), x_(3, 5), ends((1, 2))),
    "dy has dtype": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5, dtype=torch.float64), ends((1, 2))),
    "out has shape": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((1, 2)), out=x_(2, 5, 3)),
    "out has dtype": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((1,)), out=x_(1, 3, 5, dtype=torch.float16)),
    "out has dtype torch.float16; expected torch.float32$": lambda: grouped_gemm_wgrad(
        x_(4, 3), x_(4, 5), ends((1,)), out=x_(1, 3, 5, dtype=torch.float16)
    ),
    "out requires grad": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((1,)), out=x_(1, 3, 5).requires_grad_()),
    "out has strides": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((2, 2)), out=x_(1, 3, 5).expand(2, 3, 5)),
    "x is a list": lambda: grouped_gemm([[1.0]], x_(1, 1, 1), ends((1,))),
    "w is a NoneType": lambda: grouped_gemm(x_(1, 1), None, ends((1,))),
    "offsets is a list": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), [1]),
    "offsets has no group; expected": lambda: grouped_gemm_wgrad(x_(4, 3), x_(4, 5), ends((1,))[:0]),
    "x has a forward-mode tangent": lambda: torch.func.jvp(
        lambda x: grouped_gemm(x, x_(1, 3, 5), ends((4,))), (x_(4, 3),), (x_(4, 3),)
    ),
    "plan routes 2 tokens": lambda: gather_rows(x_(3, 4), PLAN),
    "plan routes 4 rows": lambda: combine_topk(x_(3, 4), None, PLAN),
    "plan is on cpu": lambda: gather_rows(x_(2, 4).to("meta"), PLAN),
    "scale has shape": lambda: gather_rows(x_(2, 4), PLAN, x_(4)[:, None]),
    "weights has shape": lambda: combine_topk(x_(4, 4), x_(2, 3), PLAN),
    "weights has dtype": lambda: combine_topk(x_(4, 4), x_(2, 2, dtype=I64), PLAN),
    "pre has shape": lambda: activation_backward(x_(4, 4), x_(4, 4), ends((4,)), activation="swiglu"),
    "da has dtype": lambda: activation_backward(x_(4, 4), x_(4, 4, dtype=torch.float16), ends((4,)), activation="gelu"),
    "offsets ends at 9": lambda: activation_backward(x_(4, 4), x_(4, 4), ends((9,)), activation="gelu"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        WRONG[message]()
