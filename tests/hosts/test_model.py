"""The whole decoder: names, sizes, causality, tying, masks, checkpointing, and what open_lm's checkpoints need."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from openlm_moe import MoEConfig, UserError, collect_losses
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import FFN_TYPES, NORMS, POSITIONS, ModelParams

DENSE, MOE = MoEConfig(num_experts=0), MoEConfig(num_experts=4)


def params(**changes: object) -> ModelParams:
    return ModelParams(**{"dim": 16, "n_layers": 3, "n_heads": 2, "seq_len": 16, "vocab_size": 13, **changes})


def build(p: ModelParams, moe: MoEConfig = MOE, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(p, moe)
    model.init_weights(0)
    return model.to(dtype)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 13, shape)


def test_names_are_those_of_open_lm() -> None:
    names = set(build(params(model_norm="gain_only_layer_norm", qk_norm=True)).state_dict())
    block = {"attention_norm.weight", "attention.in_proj.weight", "attention.out_proj.weight", "ffn_norm.weight"}
    block |= {"attention.q_norm.weight", "attention.k_norm.weight"}
    ffn = {"feed_forward.w12.weight", "feed_forward.w3.weight"}
    experts = {"feed_forward.router.weight", "feed_forward.experts.w1", "feed_forward.experts.w2"}
    expected = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    for layer_id, own in ((0, experts), (1, ffn), (2, experts)):
        expected |= {f"layers.{layer_id}.{name}" for name in block | own}
    assert names == expected


@pytest.mark.parametrize(
    ("ffn_type", "weights"),
    [
        ("swiglu", {"w12.weight": (512, 16), "w3.weight": (16, 256)}),
        ("swiglu_torch", {"w12.weight": (512, 16), "w3.weight": (16, 256)}),
        ("gelu", {"0.weight": (64, 16), "2.weight": (16, 64)}),
        ("gemma_geglu", {"gate_proj.weight": (256, 16), "up_proj.weight": (256, 16), "down_proj.weight": (16, 256)}),
    ],
)
def test_dense_feed_forward(ffn_type: str, weights: dict[str, tuple[int, int]]) -> None:
    ffn = build(params(ffn_type=ffn_type), DENSE).layers[0].feed_forward
    assert {n: tuple(p.shape) for n, p in ffn.named_parameters() if p.dim() == 2} == weights
    x = torch.randn(5, 16, dtype=torch.float64)
    if ffn_type == "gelu":
        expected = F.gelu(x @ ffn[0].weight.T) @ ffn[2].weight.T
    elif ffn_type == "gemma_geglu":
        torch.nn.init.normal_(ffn.up_proj.bias)
        expected = ffn.down_proj(F.gelu(ffn.gate_proj(x)) * ffn.up_proj(x))
    else:
        gate, up = ffn.w12.weight[:256], ffn.w12.weight[256:]
        expected = (F.silu(x @ gate.T) * (x @ up.T)) @ ffn.w3.weight.T
    assert (ffn(x) - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_moe_layers_follow_open_lms_rule(every: int) -> None:
    model = build(params(n_layers=5), MoEConfig(num_experts=2, every=every))
    has_experts = [hasattr(block.feed_forward, "experts") for block in model.layers]
    assert has_experts == [layer_id % every == 0 for layer_id in range(5)]


def test_forward_equals_its_formula() -> None:
    model = build(params(post_embed_norm=True), DENSE)
    x = model.post_embed_norm(model.tok_embeddings.weight[(ids := tokens(2, 7))])
    for block in model.layers:
        x = x + block.attention(block.attention_norm(x))
        x = x + block.feed_forward(block.ffn_norm(x))
    expected = model.norm(x) @ model.output.weight.T
    assert (model(ids) - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_at_least_fp32(dtype: torch.dtype) -> None:
    logits = build(params(), dtype=dtype)(tokens(1, 5))
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.norm() > 0


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("moe", [DENSE, MOE], ids=["dense", "moe"])
def test_future_tokens_do_not_change_past_logits(positions: str, moe: MoEConfig) -> None:
    model, ids = build(params(positional_embedding_type=positions), moe), tokens(2, 12)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 13
    before, after = model(ids), model(changed)
    assert (after[:, :6] - before[:, :6]).norm() < 1e-13 * before.norm()
    assert (after[:, 6:] - before[:, 6:]).norm() > 1e-2 * before.norm()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ffn_type", FFN_TYPES)
def test_every_parameter_gets_a_gradient(norm: str, ffn_type: str) -> None:
    model = build(params(model_norm=norm, ffn_type=ffn_type, qk_norm=True, post_embed_norm=True))
    F.cross_entropy(model(tokens(2, 16)).flatten(0, 1), tokens(32)).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = build(params(weight_tying=True)), build(params())
    assert tied.tok_embeddings.weight is tied.output.weight
    n_tied, n_untied = (sum(p.numel() for p in model.parameters()) for model in (tied, untied))
    assert n_untied - n_tied == 13 * 16
    F.cross_entropy(tied(tokens(2, 16)).flatten(0, 1), tokens(32)).backward()
    assert tied.output.weight.grad is tied.tok_embeddings.weight.grad


def test_tying_survives_a_meta_build() -> None:
    with torch.device("meta"):
        model = Transformer(params(weight_tying=True), MOE)
    model.to_empty(device="cpu").init_weights(0)
    assert model.tok_embeddings.weight is model.output.weight


def test_padding_reaches_no_real_token_and_no_router() -> None:
    model, ids = build(params()), tokens(2, 16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    changed = torch.where(mask, ids, (ids + 1) % 13)
    with collect_losses(model) as one:
        first = model(ids, mask)
    with collect_losses(model) as two:
        second = model(changed, mask)
    assert (first - second)[mask].norm() < 1e-13 * first[mask].norm()
    for name, stats in one.per_layer.items():
        assert int(stats.tokens_per_expert_E.sum()) == 2 * int(mask.sum())
        assert torch.equal(stats.tokens_per_expert_E, two.per_layer[name].tokens_per_expert_E)
    assert one.load_balancing_loss == pytest.approx(float(two.load_balancing_loss), rel=1e-6)


@pytest.mark.parametrize("mode", ["block", "experts"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing_but_memory(mode: str, use_reentrant: bool) -> None:
    ids, targets = tokens(2, 16), tokens(32)

    def run(mode: str) -> tuple[list[torch.Tensor], float, int]:
        model = build(params(qk_norm=True))
        model.set_grad_checkpointing(mode, use_reentrant)
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        with collect_losses(model) as losses:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
            loss.backward()
        return [p.grad for p in model.parameters()], float(losses.load_balancing_loss), saved

    plain, aux, plain_bytes = run("off")
    recomputed, recomputed_aux, recomputed_bytes = run(mode)
    for a, b in zip(plain, recomputed, strict=True):
        assert (a - b).norm() <= 1e-13 * a.norm()
    assert recomputed_aux == aux
    assert recomputed_bytes < (0.9 if mode == "experts" else 0.6) * plain_bytes


def test_unknown_checkpointing_mode() -> None:
    with pytest.raises(UserError, match="blocks"):
        build(params()).set_grad_checkpointing("blocks")


def test_open_lm_state_dict_loads() -> None:
    """A dense state dict with open_lm's keys fits as it is, once its position tables and aliases are left out."""
    dim, hidden, vocab = 16, 256, 13
    state = {"tok_embeddings.weight": (vocab, dim), "output.weight": (vocab, dim)}
    for name in ("norm", *(f"layers.{i}.{n}" for i in range(3) for n in ("attention_norm", "ffn_norm"))):
        state |= {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}
    for i in range(3):
        state |= {f"layers.{i}.attention.in_proj.weight": (3 * dim, dim)}
        state |= {f"layers.{i}.attention.out_proj.weight": (dim, dim)}
        state |= {f"layers.{i}.feed_forward.w12.weight": (2 * hidden, dim)}
        state |= {f"layers.{i}.feed_forward.w3.weight": (dim, hidden)}
    build(params(), DENSE).load_state_dict({name: torch.zeros(shape) for name, shape in state.items()})
