"""The layer's one autograd function against its formula, and everything that training code may do with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    NAMES,
    WITH_FIXTURES,
    Layer,
    assert_close,
    leaves,
    loop_ffn,
    loop_gradients,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openlm_moe_kernels import expert_ffn, ffn, route_plan

NAN = float("nan")
SMALL = Layer(tokens=24, dim=10, hidden=14, experts=5, top_k=2)


def run(layer: Layer, tensors, ids: Tensor, dout: Tensor, backend: str) -> dict[str, Tensor]:
    leaf = [t.detach().requires_grad_() for t in tensors]
    out = expert_ffn(*leaf, route_plan(ids, layer.experts), activation=layer.activation, backend=backend)
    assert out.dtype == layer.dtype
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaf, dout)), strict=True))


def check_layer(layer: Layer, backend: str, layout: str = "contiguous") -> None:
    """Output and all gradients against the loop; dtypes, empty experts and slots without an expert exactly."""
    ids, tensors = layer.ids(), layer.tensors()
    dout = torch.randn(layer.tokens, layer.dim).to(layer.dtype)
    view = LAYOUTS[layout]
    got = run(layer, [view(t) for t in tensors], ids, view(dout), backend)
    for name, want in loop_gradients(layer, tensors, ids, dout).items():
        assert_close(name, got[name], want, layer.dtype)
    for name, t in zip(NAMES[1:], tensors, strict=True):
        assert got[name].dtype == t.dtype
    assert got["dweights"][ids == layer.experts].count_nonzero() == 0
    for e in range(layer.experts):
        if not (ids == e).any():
            assert got["dw1"][e].count_nonzero() == got["dw2"][e].count_nonzero() == 0


layers = st.builds(
    Layer,
    tokens=st.integers(0, 40),
    dim=st.integers(1, 40),
    hidden=st.integers(1, 40),
    experts=st.integers(3, 9),
    top_k=st.integers(1, 3),
    activation=st.sampled_from(("gelu", "swiglu")),
    dtype=st.sampled_from(DTYPES),
    sentinels=st.sampled_from((0.0, 0.2, 1.0)),
)
any_layer = given(layer=layers, backend=st.sampled_from(BACKENDS), layout=st.sampled_from(sorted(LAYOUTS)))


@settings(max_examples=80, derandomize=True, **WITH_FIXTURES)
@any_layer
def test_any_layer(uninitialised_is_nan, layer: Layer, backend: str, layout: str) -> None:
    check_layer(layer, backend, layout)


@pytest.mark.slow
@settings(max_examples=1500, **WITH_FIXTURES)
@any_layer
def test_any_layer_at_length(uninitialised_is_nan, layer: Layer, backend: str, layout: str) -> None:
    check_layer(layer, backend, layout)


@pytest.mark.parametrize("sentinels", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str, activation: str, sentinels: float) -> None:
    layer = Layer(6, 4, 3, 4, 2, activation, sentinels=sentinels)
    plan, tensors = route_plan(layer.ids(), 4), layer.tensors()
    how = {"activation": activation, "backend": backend}
    assert torch.autograd.gradcheck(lambda *t: expert_ffn(*t, plan, **how), leaves(*tensors))


@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_weights_reach_the_expert_gradients(backend: str) -> None:
    """A17: with weights 0.9 and 0.1, and one token for each pair, dw of an expert scales with its weight."""
    w1, w2 = leaves(*(torch.ones(2, *s, dtype=torch.float64) for s in ((3, 4), (4, 3))))
    x, weights = torch.ones(1, 3, dtype=torch.float64), torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    expert_ffn(x, weights, w1, w2, route_plan(torch.tensor([[0, 1]]), 2), backend=backend).sum().backward()
    for w in (w1, w2):
        assert w.grad[0].min() > 0.1
        torch.testing.assert_close(w.grad[0], 9 * w.grad[1])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_may_hold_nan(backend: str, activation: str, uninitialised_is_nan) -> None:
    """A1: rows without an expert are not computed on, in two passes of forward and backward."""
    layer = Layer(30, 12, 16, 4, 2, activation, torch.float32)
    ids, tensors, dout = layer.ids(), layer.tensors(), torch.randn(30, 12)
    ids[20:] = layer.experts
    want = loop_gradients(layer, tensors, ids, dout)
    for t in (*tensors[:2], dout):
        t[20:] = NAN
    for _ in range(2):
        got = run(layer, tensors, ids, dout, backend)
        for name in NAMES:
            assert_close(name, got[name], want[name], layer.dtype)
        assert sum(got[name][20:].count_nonzero() for name in NAMES[:3]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tokens_to_one_expert_then_none(backend: str, uninitialised_is_nan) -> None:
    layer = Layer(40, 12, 16, 6, 1, "swiglu", torch.float32)
    tensors, dout = layer.tensors(), torch.randn(40, 12)
    for expert in (0, 3, 5, 6):
        ids = torch.full((40, 1), expert)
        got, want = run(layer, tensors, ids, dout, backend), loop_gradients(layer, tensors, ids, dout)
        for name in NAMES:
            assert_close(name, got[name], want[name], layer.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_the_same_bits_each_time(backend: str, dtype: torch.dtype) -> None:
    layer = Layer(200, 33, 40, 5, 2, dtype=dtype)
    ids, tensors, dout = layer.ids(), layer.tensors(), torch.randn(200, 33).to(dtype)
    first = run(layer, tensors, ids, dout, backend)
    for _ in range(3):
        again = run(layer, [t.clone() for t in tensors], ids, dout, backend)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_twenty_training_steps_follow_the_loop(activation: str, backend: str) -> None:
    """A8: not the first forward alone; gradients are compared at every step."""
    layer = Layer(48, 12, 20, 4, 2, activation, torch.float32)
    x, _, *initial = layer.tensors()
    router, target = torch.randn(12, 4) / 3, torch.randn(48, 12)
    ours, loop = leaves(*(t.clone() for t in (router, *initial))), leaves(*(t.clone() for t in (router, *initial)))
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in (ours, loop)]
    losses = []
    for _ in range(20):
        step_losses = []
        for parameters, apply in ((ours, expert_ffn), (loop, loop_ffn)):
            router, w1, w2 = parameters
            weights, ids = (x @ router).softmax(-1).topk(2)
            if apply is expert_ffn:
                out = expert_ffn(x, weights, w1, w2, route_plan(ids, 4), activation=activation, backend=backend)
            else:
                out = loop_ffn(x, weights, w1, w2, ids, activation)
            loss = (out - target).square().mean()
            loss.backward()
            step_losses.append(loss.item())
        for name, a, b in zip(("drouter", "dw1", "dw2"), ours, loop, strict=True):
            assert_close(name, a.grad, b.grad, torch.float32, factor=30)  # Adam divides by small gradients
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert step_losses[0] == pytest.approx(step_losses[1], rel=1e-5)
        losses.append(step_losses[0])
    assert losses[-1] < 0.8 * losses[0]


class TestTrainingCode:
    """What training code does with a function, on the backend that a CPU gets."""

    def setup_method(self) -> None:
        torch.manual_seed(0)
        self.plan = route_plan(SMALL.ids(), SMALL.experts)
        self.tensors = leaves(*SMALL.tensors())
        self.dout = torch.randn(SMALL.tokens, SMALL.dim, dtype=SMALL.dtype)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return expert_ffn(x, *(others or self.tensors[1:]), self.plan)

    def grads(self, out: Tensor, dout: Tensor | None = None, **more) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.tensors, self.dout if dout is None else dout, **more)

    def test_two_forwards_before_a_backward(self) -> None:
        alone = self.grads(self.forward(*self.tensors))
        x = self.tensors[0]
        both = self.grads(self.forward(x) + self.forward(2 * x))
        second = self.grads(self.forward(2 * x))
        for one, two, sum_ in zip(alone, second, both, strict=True):
            torch.testing.assert_close(one + two, sum_)

    def test_backwards_in_reverse_order(self) -> None:
        x = self.tensors[0]
        expected = [self.grads(self.forward(x)), self.grads(self.forward(3 * x))]
        first, second = self.forward(x), self.forward(3 * x)
        for out, want in ((second, expected[1]), (first, expected[0])):
            for a, b in zip(self.grads(out), want, strict=True):
                assert torch.equal(a, b)

    def test_backward_twice_through_one_graph(self) -> None:
        out = self.forward(*self.tensors)
        first, second = self.grads(out, retain_graph=True), self.grads(out)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_weights_used_by_two_layers_get_both_gradients(self) -> None:
        x = self.tensors[0]
        expert_ffn(self.forward(x), *self.tensors[1:], self.plan).backward(self.dout)
        exact = [t.detach().clone().requires_grad_() for t in self.tensors]
        ids = torch.empty(SMALL.tokens * 2, dtype=torch.int64)
        ids[self.plan.order_N] = torch.repeat_interleave(self.plan.counts_E.long())
        ids = ids.view(-1, 2)
        loop_ffn(loop_ffn(*exact, ids, "gelu"), *exact[1:], ids, "gelu").backward(self.dout)
        for ours, want in zip(self.tensors, exact, strict=True):
            torch.testing.assert_close(ours.grad, want.grad)

    def test_hooks_on_parameters_see_and_change_gradients(self) -> None:
        want = self.grads(self.forward(*self.tensors))
        w1, seen = self.tensors[2], []
        w1.register_hook(lambda grad: grad * 2)
        w1.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        self.forward(*self.tensors).backward(self.dout)
        torch.testing.assert_close(seen[0], 2 * want[2])
        torch.testing.assert_close(self.tensors[3].grad, want[3])

    def test_gradients_accumulate(self) -> None:
        want = self.grads(self.forward(*self.tensors))
        for _ in range(3):
            self.forward(*self.tensors).backward(self.dout)
        for t, grad in zip(self.tensors, want, strict=True):
            torch.testing.assert_close(t.grad, 3 * grad)

    def test_expanded_output_gradient(self) -> None:
        ones = self.grads(self.forward(*self.tensors), torch.ones_like(self.dout))
        out = self.forward(*self.tensors)
        for a, b in zip(torch.autograd.grad(out.sum(), self.tensors), ones, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (1, 3)])
    def test_frozen_inputs_get_no_gradient(self, wanted: tuple[int, ...]) -> None:
        want = self.grads(self.forward(*self.tensors))
        inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(self.tensors)]
        self.forward(*inputs).backward(self.dout)
        for i, t in enumerate(inputs):
            assert (t.grad is not None) == (i in wanted)
            assert t.grad is None or torch.equal(t.grad, want[i])

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpointing(self, use_reentrant: bool) -> None:
        want = self.grads(self.forward(*self.tensors))
        out = checkpoint(self.forward, *self.tensors, use_reentrant=use_reentrant)
        out.backward(self.dout)
        assert all(torch.equal(t.grad, grad) for t, grad in zip(self.tensors, want, strict=True))

    def test_second_derivatives_are_refused(self) -> None:
        (dx, *_) = self.grads(self.forward(*self.tensors), create_graph=True)
        with pytest.raises(RuntimeError, match="autograd"):
            dx.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("activation", "factor"), [("gelu", 1), ("swiglu", 2)])
def test_saved_for_backward(activation: str, factor: int, backend: str) -> None:
    """Decision 6: the inputs, the pre-activation and the plan. Nothing else of the size of N rows."""
    layer = Layer(64, 16, 48, 4, 2, activation, torch.float32)
    plan, inputs = route_plan(layer.ids(), 4), leaves(*layer.tensors())
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = expert_ffn(*inputs, plan, activation=activation, backend=backend)
    known = {t.data_ptr() for t in (*inputs, *plan.tensors())}
    new = [t for t in saved if t.data_ptr() not in known]
    assert [tuple(t.shape) for t in new] == [(128, factor * 48)]
    assert len(saved) == 4 + 1 + len(plan.tensors())
    out.sum().backward()


def test_nothing_is_kept_without_gradients() -> None:
    plan, inputs = route_plan(SMALL.ids(), SMALL.experts), SMALL.tensors()
    arguments = (plan.tensors(), 2, "gelu", "torch", False)
    kept, pre = ffn._forward(*inputs, *arguments, True)
    free, nothing = ffn._forward(*inputs, *arguments, False)
    assert torch.equal(kept, free)
    assert pre.shape == (48, 14)
    assert nothing.numel() == 0


def test_inference_mode_and_no_grad() -> None:
    plan, inputs = route_plan(SMALL.ids(), SMALL.experts), SMALL.tensors()
    want = expert_ffn(*leaves(*inputs), plan).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = expert_ffn(*leaves(*inputs), plan)
        assert torch.equal(out, want)
        assert not out.requires_grad


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("needs", [(True, True, True, True), (False, True, True, False)])
def test_operators_are_registered_properly(activation: str, needs: tuple[bool, ...]) -> None:
    layer = Layer(6, 4, 3, 4, 2, activation, torch.float32, sentinels=0.2)
    inputs = leaves(*layer.tensors())
    plan = route_plan(layer.ids(), 4).tensors()
    torch.library.opcheck(ffn._forward, (*inputs, plan, 2, activation, "torch", False, True))
    plain = [t.detach() for t in inputs]
    _, pre = ffn._forward(*plain, plan, 2, activation, "torch", False, True)
    torch.library.opcheck(
        ffn._gradients, (torch.ones(6, 4), *plain, pre, plan, 2, activation, "torch", False, list(needs))
    )


def test_compile_keeps_the_layer_whole_and_compiles_once_for_all_token_counts() -> None:
    """A18, G4: one graph without a break, the same bits as without torch.compile, no recompilation per batch."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def layer(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids = (x @ router).softmax(-1).topk(2)
        return expert_ffn(x, weights, w1, w2, route_plan(ids, w1.shape[0]), activation="swiglu")

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=record)
    weights = leaves(torch.randn(8, 4), torch.randn(4, 8, 12), torch.randn(4, 6, 8))
    for tokens in (5, 16, 40, 41):
        x = torch.randn(tokens, 8, requires_grad=True)
        results = [
            (out.detach(), *torch.autograd.grad(out.square().sum(), (x, *weights)))
            for out in (compiled(x, *weights), layer(x, *weights))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("openlm_moe.expert_ffn" in target for target in targets) == 1
    assert sum("openlm_moe.route_plan" in target for target in targets) == 1


def test_compiled_backward() -> None:
    """Through the ahead-of-time autograd that every compiler backend shares."""
    torch._dynamo.reset()
    plan, inputs = route_plan(SMALL.ids(), SMALL.experts), leaves(*SMALL.tensors())
    compiled = torch.compile(lambda *t: expert_ffn(*t, plan), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(expert_ffn(*inputs, plan).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))


WRONG = {
    "x has shape": {"x": torch.zeros(2, 3, 4)},
    "x has dtype": {"x": torch.zeros(6, 4, dtype=torch.int64)},
    "w1 has dtype": {"x": torch.zeros(6, 4, dtype=torch.bfloat16)},
    "w2 has dtype": {"w2": torch.zeros(3, 5, 4, dtype=torch.float64)},
    "w1 is on": {"w1": torch.zeros(3, 4, 5, device="meta")},
    "w1 has shape": {"w1": torch.zeros(3, 5, 5)},
    r"w1 has shape \(3, 4, 5\); expected \(E, D, 2F\)": {"activation": "swiglu"},
    "w2 has shape": {"w2": torch.zeros(3, 5, 5)},
    "weights has shape": {"weights": torch.zeros(6, 3)},
    "weights has dtype": {"weights": torch.zeros(6, 2, dtype=torch.int64)},
    "weights is on": {"weights": torch.zeros(6, 2, device="meta")},
    "plan routes 5 tokens": {"plan": route_plan(torch.zeros(5, 2, dtype=torch.int64), 3)},
    "plan has 4 experts": {"plan": route_plan(torch.zeros(6, 2, dtype=torch.int64), 4)},
    "activation is None": {"activation": None},
    "activation is 'silu'": {"activation": "silu"},
    "backend is 'cutlass'": {"backend": "cutlass"},
    "backend 'triton' cannot run: the tensors are on a CPU": {"backend": "triton"},
}


def test_forward_mode_is_refused() -> None:
    plan = route_plan(torch.zeros(6, 2, dtype=torch.int64), 3)
    others = torch.zeros(6, 2), torch.zeros(3, 4, 5), torch.zeros(3, 5, 4), plan
    x = torch.zeros(6, 4)
    with pytest.raises(ValueError, match=r"^x has a forward-mode tangent"):
        torch.func.jvp(lambda x: expert_ffn(x, *others), (x,), (x,))


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    arguments = {
        "x": torch.zeros(6, 4),
        "weights": torch.zeros(6, 2),
        "w1": torch.zeros(3, 4, 5),
        "w2": torch.zeros(3, 5, 4),
        "plan": route_plan(torch.zeros(6, 2, dtype=torch.int64), 3),
        "activation": "gelu",
        "backend": "auto",
        **WRONG[message],
    }
    x, weights, w1, w2, plan = (arguments.pop(name) for name in ("x", "weights", "w1", "w2", "plan"))
    with pytest.raises(ValueError, match=f"^{message}"):
        expert_ffn(x, weights, w1, w2, plan, **arguments)
