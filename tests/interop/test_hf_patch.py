"""Our experts in blocks that keep each expert as a module of its own, as transformers 4 does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from openlm_moe import UserError
from openlm_moe.interop.hf_experts import patch

D, HIDDEN, E, K = 12, 18, 4, 2
MIXTRAL, OTHERS = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


class Expert(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        for name, (inside, outside) in zip(names, ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D)), strict=True):
            self.add_module(name, nn.Linear(inside, outside, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


def block(kind, names, **attributes):
    """A block of the named class whose forward is the definition: every token through its experts, one by one."""

    def forward(self, hidden_states):
        x = hidden_states.view(-1, D)
        logits = self.gate(x)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(K, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        rows = [
            sum(w * self.experts[e](x[t]) for w, e in zip(weights[t], ids[t].tolist(), strict=True))
            for t in range(len(x))
        ]
        return torch.stack(rows).view_as(hidden_states), logits

    made = type(kind, (nn.Module,), {"forward": forward})()
    made.gate = nn.Linear(D, E, bias=False)
    made.experts = nn.ModuleList(Expert(names) for _ in range(E))
    made.top_k = K
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "made",
    [
        lambda: block("MixtralSparseMoeBlock", MIXTRAL, jitter_noise=0.0),
        lambda: block("OlmoeSparseMoeBlock", OTHERS, norm_topk_prob=False),
        lambda: block("Qwen3MoeSparseMoeBlock", OTHERS, norm_topk_prob=True),
    ],
    ids=["mixtral", "olmoe", "qwen3"],
)
def test_outputs_and_gradients_equal_the_block(made):
    model = nn.Sequential(made()).eval()
    x = torch.randn(2, 7, D, requires_grad=True)
    want, want_logits = model(x)
    want_grad, want_router = torch.autograd.grad(want.square().sum(), [x, model[0].gate.weight])
    assert patch(model) == 1
    assert not model.training
    got, logits = model(x)
    grad, router = torch.autograd.grad(got.square().sum(), [x, model[0].gate.weight])
    torch.testing.assert_close(logits, want_logits)
    for g, w in ((got, want), (grad, want_grad), (router, want_router)):
        assert (g - w).norm() <= 1e-5 * w.norm()


def test_jitter_and_models_without_such_blocks_are_refused():
    with pytest.raises(UserError, match=r"router_jitter_noise is 0\.1"):
        patch(nn.Sequential(block("MixtralSparseMoeBlock", MIXTRAL, jitter_noise=0.1)))
    with pytest.raises(UserError, match="no block of MixtralSparseMoeBlock"):
        patch(nn.Sequential(nn.Linear(2, 2)))
