"""What is particular to the torch backend: its blocks, its use of torch's grouped GEMM, and how a backend is chosen."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from moe_cases import DTYPES, Layer, act, assert_close, ends, loop_gradients, loop_products
from test_expert_ffn import check_layer, run
from test_ops import Product, check_product
from torch import Tensor

from openlm_moe_kernels import backend, checks, cpu_activation, cpu_ffn, expert_ffn, route_plan, torch_backend

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, uninitialised_is_nan) -> None:
    """Products of at most 7 rows, activations of about 3 rows at a time."""
    monkeypatch.setattr(cpu_ffn, "BLOCK_ROWS", {2: 7, 4: 7, 8: 7})
    monkeypatch.setattr(cpu_activation, "BLOCK_ELEMENTS", 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_rows_in_many_blocks(activation: str, dtype: torch.dtype, small_blocks) -> None:
    check_layer(Layer(60, 12, 16, 4, 2, activation, dtype, sentinels=0.1), "torch")


def test_blocks_cover_the_rows_evenly(small_blocks) -> None:
    for n in range(60):
        cut = list(cpu_ffn.blocks(5, 5 + n, 4))
        assert [row for a, b in cut for row in range(a, b)] == list(range(5, 5 + n))
        lengths = [b - a for a, b in cut]
        assert len(cut) == -(-n // 7)
        assert n == 0 or (max(lengths) <= 7 and max(lengths) - min(lengths) <= 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gelu_is_the_tanh_approximation_everywhere(dtype: torch.dtype) -> None:
    x = torch.cat(
        [torch.linspace(-12, 12, 4001, dtype=dtype), torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4], dtype=dtype)]
    )
    x = x[:, None].clone()
    out, dx, dscale = torch.empty_like(x), torch.empty_like(x), torch.empty(x.shape[0], dtype=dtype)
    blocked = cpu_activation.BlockedActivation("gelu", 1, dtype)
    blocked.forward(x, out)
    exact = x.double().clone().requires_grad_()
    want = act(exact, "gelu")
    (want_dx,) = torch.autograd.grad(want.sum(), exact)
    tolerance = {torch.float64: 1e-14, torch.float32: 5e-7}[dtype]
    torch.testing.assert_close(out.double(), want.detach(), rtol=tolerance, atol=tolerance)
    blocked.backward(x, torch.ones_like(x), out, dx, dscale)
    # The derivative has x - gelu(x) in it, which cancels for large x and is multiplied by x^2.
    torch.testing.assert_close(dx.double(), want_dx, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_with_torchs_grouped_gemm(activation: str | None, monkeypatch, uninitialised_is_nan) -> None:
    """The path of a GPU, on the CPU's implementation: its tail is uninitialised, its empty groups need not be zero."""
    monkeypatch.setattr(torch_backend, "_has_grouped_mm", lambda x, w: True)
    sizes, tail = (16, 0, 24, 0), 5
    x, w, dy = (torch.randn(*s).bfloat16() for s in ((45, 16), (4, 16, 32), (45, 32)))
    columns = 16 if activation == "swiglu" else 32
    y = torch_backend.grouped_gemm(x, w, ends(sizes), activation=activation)
    assert_close("y", y, loop_products(x.double(), w.double(), sizes, tail, activation), torch.bfloat16)
    assert y.shape == (45, columns)
    assert y[40:].count_nonzero() == 0
    dw = torch_backend.grouped_gemm_wgrad(x, dy, ends(sizes))
    want = [a.double().mT @ b.double() for a, b in zip(x[:40].split(sizes), dy[:40].split(sizes), strict=True)]
    assert_close("dw", dw, torch.stack(want), torch.bfloat16)
    assert dw[1].count_nonzero() == dw[3].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_composition_agrees(dtype: torch.dtype, monkeypatch) -> None:
    """What a GPU runs instead of the blocked feed-forward."""
    layer = Layer(40, 16, 24, 4, 2, "swiglu", dtype, sentinels=0.2)
    ids, tensors, dout = layer.ids(), layer.tensors(), torch.randn(40, 16).to(dtype)

    def forward(*arguments):
        return torch_backend.composition.ffn_forward(torch_backend, *arguments, False)

    def backward(*arguments):
        return torch_backend.composition.ffn_backward(torch_backend, *arguments, False)

    monkeypatch.setattr(cpu_ffn, "ffn_forward", forward)
    monkeypatch.setattr(cpu_ffn, "ffn_backward", backward)
    got = run(layer, tensors, ids, dout, "torch")
    for name, want in loop_gradients(layer, tensors, ids, dout).items():
        assert_close(name, got[name], want, dtype)


class TestMutations:
    """The faults that such kernels had, put in on purpose: each must be noticed."""

    def must_fail(self, check, *arguments) -> None:
        with pytest.raises(AssertionError):
            check(*arguments)

    def test_tail_not_zeroed(self, monkeypatch, uninitialised_is_nan) -> None:
        layer, product = Layer(30, 8, 12, 4, 2, sentinels=0.3), Product((5, 0, 9), 3, 8, 12)
        check_product(product)
        check_layer(layer, "torch")
        products = torch_backend._products

        def keep_tail(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
            y = products(x, w, offsets)
            y[int(offsets[-1]) :] = y.new_empty(1)
            return y

        monkeypatch.setattr(torch_backend, "_products", keep_tail)
        self.must_fail(check_product, product)
        embedding_bag = cpu_ffn.F.embedding_bag

        def unwritten(slots: Tensor, rows: Tensor, **more) -> Tensor:
            rows[-1] = float("nan")
            return embedding_bag(slots, rows, **more)

        monkeypatch.setattr(cpu_ffn.F, "embedding_bag", unwritten)
        self.must_fail(check_layer, layer, "torch")

    def test_gate_halves_swapped(self, monkeypatch) -> None:
        forward, backward, factor = cpu_activation._STEPS["swiglu"]
        layer, product = Layer(30, 8, 12, 4, 2, "swiglu"), Product((5, 0, 9), 0, 8, 12, activation="swiglu")
        check_product(product)
        check_layer(layer, "torch")

        def swapped(x: Tensor, *outputs: Tensor) -> None:
            forward(x.roll(x.shape[1] // 2, dims=1), *outputs)

        monkeypatch.setitem(cpu_activation._STEPS, "swiglu", (swapped, backward, factor))
        self.must_fail(check_product, product)
        self.must_fail(check_layer, layer, "torch")

    @pytest.mark.parametrize("part", ["last column", "last inner element", "last row", "weight of its neighbour"])
    @pytest.mark.parametrize("check", ["layer", "product"])
    def test_part_of_a_product_skipped(self, check: str, part: str, monkeypatch) -> None:
        layer, product = Layer(30, 8, 12, 4, 2), Product((5, 0, 9), 0, 8, 12)
        function, arguments = (check_layer, (layer, "torch")) if check == "layer" else (check_product, (product,))
        function(*arguments)
        mm, before = torch.mm, []

        def wrong(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
            if part == "last inner element":
                return mm(a[:, :-1], b[:-1], out=out)
            same = [other for other in before if other.shape == b.shape]
            before.append(b)
            mm(a, same[-1] if part == "weight of its neighbour" and same else b, out=out)
            if part == "last column":
                out[:, -1] = 0
            if part == "last row":
                out[-1] = 0
            return out

        monkeypatch.setattr(torch, "mm", wrong)
        self.must_fail(function, *arguments)

    def test_empty_groups_gradient_not_zeroed(self, monkeypatch, uninitialised_is_nan) -> None:
        monkeypatch.setattr(cpu_ffn, "_zero_others", lambda *arguments: None)
        self.must_fail(check_layer, Layer(30, 8, 12, 4, 2), "torch")

    def test_combine_weights_left_out_of_the_gradients(self, monkeypatch) -> None:
        layer = Layer(30, 8, 12, 4, 2)
        check_layer(layer, "torch")
        monkeypatch.setattr(Tensor, "mul_", lambda self, other: self)
        self.must_fail(check_layer, layer, "torch")


class TestSelection:
    @pytest.fixture(autouse=True)
    def nothing_chosen_yet(self):
        backend.select.cache_clear()
        yield
        backend.select.cache_clear()

    def test_auto_on_a_cpu_is_torch_and_says_why_once(self, caplog) -> None:
        with caplog.at_level(logging.INFO, logger="openlm_moe_kernels"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [backend.select("auto", CPU, torch.float32) for _ in range(3)] == ["torch"] * 3
        assert len(caplog.messages) == 1
        assert "chose torch" in caplog.messages[0]
        assert "CPU" in caplog.messages[0]

    def test_unsupported_dtype_falls_back_with_one_warning(self) -> None:
        with pytest.warns(UserWarning, match="fell back to torch: triton cannot run: .*float64") as caught:
            chosen = [backend.select("auto", torch.device("cuda"), torch.float64) for _ in range(3)]
        assert chosen == ["torch"] * 3
        assert len(caught) == 1

    def test_unsupported_device_falls_back_with_one_warning(self) -> None:
        with pytest.warns(UserWarning, match="fell back to torch: triton cannot run: .*mps") as caught:
            assert backend.select("auto", torch.device("mps"), torch.float32) == "torch"
        assert len(caught) == 1

    def test_missing_triton_is_a_reason(self, monkeypatch) -> None:
        def load(name: str):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

        monkeypatch.setattr(backend, "load", load)
        assert backend.why_not("triton", CPU, torch.float32) == "triton is not installed"

    def test_a_named_backend_is_never_replaced(self) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="backend 'triton' cannot run: the tensors are on a CPU"):
                backend.select("triton", CPU, torch.float32)
        assert backend.select("reference", CPU, torch.float32) == "reference"

    def test_named_backend_is_the_one_that_runs(self, monkeypatch) -> None:
        layer = Layer(5, 4, 3, 4, 2)
        plan, tensors = route_plan(layer.ids(), 4), layer.tensors()
        called: list[str] = []
        for name in ("torch", "reference"):
            module = backend.load(name)
            real = module.ffn_forward

            def record(*arguments, _name=name, _real=real, **more):
                called.append(_name)
                return _real(*arguments, **more)

            monkeypatch.setattr(module, "ffn_forward", record)
        for name in ("torch", "reference", "auto"):
            expert_ffn(*tensors, plan, backend=name)
        assert called == ["torch", "reference", "torch"]


def test_values_are_read_on_a_device_only_when_asked(monkeypatch) -> None:
    on_device = torch.zeros(3, device="meta")
    monkeypatch.delenv("OPENLM_MOE_CHECK", raising=False)
    assert checks.readable(torch.zeros(3))
    assert not checks.readable(on_device)
    checks.offset_values(on_device, 0)
    checks.index_values("gather", on_device, 0)
    monkeypatch.setenv("OPENLM_MOE_CHECK", "1")
    assert checks.readable(on_device)
