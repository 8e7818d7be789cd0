"""Our experts inside transformers' models: equal to the models' own, for every way the interface stores experts."""

import warnings

import pytest
import torch
from torch import nn

from openlm_moe.interop import hf_experts, hf_families

pytest.importorskip("transformers", minversion="5.0")

ORDINARY = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "phimoe",
    "jamba",
    "minimax",
    "glm4_moe",
]
T, D, HIDDEN, E, K = 13, 12, 10, 5, 2


@pytest.mark.parametrize("family", ORDINARY)
def test_family_equals_its_own_experts_in_fp64(family):
    status = hf_families.check(family, torch.float64)
    assert status.verdict == "equal", status


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_family_equals_its_own_experts_in_fp32(family):
    status = hf_families.check(family, torch.float32)
    assert status.verdict == "equal", status


def test_deepseek_v2_with_experts_of_1408_at_full_width():
    wide = dict(
        hidden_size=2048, moe_intermediate_size=1408, num_hidden_layers=1, n_routed_experts=8, n_shared_experts=1
    )
    status = hf_families.check("deepseek_v2", torch.float32, **wide)
    assert status.verdict == "equal", status


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_family():
    statuses = [hf_families.check(family) for family in hf_families.families()]
    assert [s for s in statuses if s.verdict == "different"] == []
    assert sum(s.verdict == "equal" for s in statuses) >= 50


def test_the_committed_table_is_of_this_form(repo_root):
    table = (repo_root / "results" / "hf_families.md").read_text()
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ") and "verdict" not in line]
    assert len(rows) >= 60
    assert not [row for row in rows if "different" in row[1]]


class Toy(nn.Module):
    """An experts module with every storage option of the interface."""

    def __init__(self, config, gate, bias, transposed):
        super().__init__()
        self.num_experts = E
        width = 2 * HIDDEN if gate else HIDDEN
        up, down = ((D, width), (HIDDEN, D)) if transposed else ((width, D), (D, HIDDEN))
        name = "gate_up_proj" if gate else "up_proj"
        self.register_parameter(name, nn.Parameter(torch.randn(E, *up)))
        self.down_proj = nn.Parameter(torch.randn(E, *down))
        if bias:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, width)))
            self.down_proj_bias = nn.Parameter(torch.randn(E, D))
        self.act_fn = nn.SiLU()
        self.post_expert_norm = nn.RMSNorm(D)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("the registered implementation runs instead")


class ClampedToy(Toy):
    """GPT-OSS's gate: interleaved, clamped, its own sigmoid."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def toy(implementation, base=Toy, *, gate=True, bias=False, transposed=False, concatenated=True, norm=False):
    from transformers import PretrainedConfig
    from transformers.integrations.moe import use_experts_implementation

    own = type(base.__name__, (base,), {"__init__": base.__init__, "forward": base.forward})
    decorated = use_experts_implementation(
        own,
        is_concatenated=concatenated,
        is_transposed=transposed,
        has_bias=bias,
        has_gate=gate,
        has_post_expert_norm=norm,
    )
    config = PretrainedConfig()
    config._experts_implementation = implementation
    torch.manual_seed(0)
    return decorated(config, gate, bias, transposed).double()


def run(module, sentinels=False):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, dtype=torch.double, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    weights = torch.rand(T, K, dtype=torch.double, generator=generator)
    if sentinels:
        module._is_expert_parallel = True
        ids[::3, 1] = E
        weights = weights.masked_fill(ids == E, 0.0)
    weights.requires_grad_()
    out = module(x, ids, weights)
    out.square().sum().backward()
    return [out.detach(), x.grad, weights.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(transposed=True),
        dict(bias=True),
        dict(gate=False),
        dict(gate=False, bias=True, transposed=True),
        dict(norm=True),
        dict(base=ClampedToy, bias=True, transposed=True, concatenated=False),
    ],
    ids=str,
)
def test_every_storage_option_equals_transformers_batched_experts(options, sentinels):
    name = hf_experts.register()
    want = run(toy("batched_mm", **options), sentinels)
    got = run(toy(name, **options), sentinels)
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert (g - w).norm() <= 1e-12 * max(w.norm(), 1e-30)
    assert want[0].norm() > 1


def test_bf16_and_autocast_keep_the_dtype_of_the_input():
    name = hf_experts.register()
    exact = run(toy(name))[0]
    module = toy(name).float()
    x = torch.randn(T, D, dtype=torch.double, generator=torch.Generator().manual_seed(3)).float()
    generator = torch.Generator().manual_seed(3)
    torch.randn(T, D, dtype=torch.double, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    weights = torch.rand(T, K, dtype=torch.double, generator=generator).float()
    with torch.autocast("cpu", torch.bfloat16):
        cast = module(x, ids, weights)
    half = module.to(torch.bfloat16)(x.bfloat16(), ids, weights.bfloat16())
    assert cast.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    for out in (cast, half):
        assert (out.double() - exact).norm() <= 3e-2 * exact.norm()


def test_what_cannot_be_served_runs_its_own_code_with_one_warning():
    name = hf_experts.register()

    class Unstacked(Toy):
        def __init__(self, *args):
            super().__init__(*args)
            del self.down_proj

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states * 2

    module = toy(name, Unstacked)
    x = torch.ones(3, D, dtype=torch.double)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [module(x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)) for _ in range(2)]
    assert all(torch.equal(out, 2 * x) for out in outs)
    assert len(caught) == 1
    assert "Unstacked runs its own experts implementation" in str(caught[0].message)
    assert "no stacked weight down_proj" in str(caught[0].message)
