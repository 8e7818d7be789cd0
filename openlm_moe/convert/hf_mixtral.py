"""Mixtral (arXiv 2401.04088): its config.json and its tensors' names, and when a model of ours is one.

Shapes: D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.convert.hf_links import Link
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import ModelParams

# Fields that change what is computed, and the one value of each that the built-in model computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "tie_word_embeddings": (False, None),
    "router_jitter_noise": (0, None),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}
# transformers' defaults of fields that a config.json may leave out
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096 * 32,
}
_THETA = 1e6
_WHOLE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
STACKED = ".mlp.experts.gate_up_proj"  # what tells transformers 5's own names from those of the files it writes


def read(config: dict[str, Any], seq_len: int | None) -> tuple[ModelParams, MoEConfig]:
    """Our description of a Mixtral. `seq_len`: the context, None for the config's. Raises `UserError` by field."""
    for field, allowed in _ONLY.items():
        if config.get(field, allowed[0]) not in allowed:
            raise UserError(f"{field} is {config[field]!r}; only {allowed[0]!r} can be converted")
    values = {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    values |= {name: config.get(name) for name in _WHOLE}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, value in values.items():
        if type(value) not in ((int, float) if name == "rms_norm_eps" else (int,)) or value <= 0:
            raise UserError(f"{name} is {value!r}; it must be a number above 0")
    dim, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    if head_dim != dim // heads:
        raise UserError(
            f"head_dim is {head_dim}; only hidden_size // num_attention_heads, here {dim // heads}, can be converted"
        )
    context = _context(config, values["max_position_embeddings"], seq_len)
    params = ModelParams(
        dim=dim,
        n_layers=values["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=values["num_key_value_heads"],
        seq_len=context,
        vocab_size=values["vocab_size"],
        model_norm="rms_norm",
        norm_eps=float(values["rms_norm_eps"]),
        rope_theta=_rope_theta(config),
    )
    moe = MoEConfig(
        num_experts=values["num_local_experts"],
        top_k=values["num_experts_per_tok"],
        every=1,
        ffn="swiglu",
        ffn_dim=values["intermediate_size"],
        normalize_weights=True,
    )
    return params, moe


def _context(config: dict[str, Any], positions: int, seq_len: int | None) -> int:
    if seq_len is not None and not 1 <= seq_len <= positions:
        raise UserError(f"--seq-len is {seq_len}; the model's max_position_embeddings is {positions}")
    context = positions if seq_len is None else seq_len
    window = config.get("sliding_window")
    if window is not None and window < context:
        raise UserError(
            f"sliding_window is {window}, less than the context of {context}, and attention here sees all of it; "
            f"convert with --seq-len {window} or less"
        )
    return context


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UserError(f"rope_parameters.rope_type is {kind!r}; only 'default' can be converted")
    theta = rope.get("rope_theta", config.get("rope_theta", _THETA))
    if type(theta) not in (int, float) or theta <= 0:
        raise UserError(f"rope_theta is {theta!r}; it must be a number above 0")
    return float(theta)


def differences(params: ModelParams, moe: MoEConfig) -> list[str]:
    """What keeps a model of ours from being a Mixtral, in words; nothing if it is one."""
    wanted = (
        ("model_norm", params.model_norm, "rms_norm"),
        ("positional_embedding_type", params.positional_embedding_type, "rotary"),
        ("qk_norm", params.qk_norm, False),
        ("post_embed_norm", params.post_embed_norm, False),
        ("weight_tying", params.weight_tying, False),
        ("MoE layers", list(moe.moe_layer_ids(params.n_layers)), list(range(params.n_layers))),
        ("moe ffn", moe.ffn, "swiglu"),
        ("moe normalize_weights", moe.normalize_weights, True),
        ("moe score", moe.score, "softmax"),
        ("moe shared_experts", moe.shared_experts, 0),
    )
    out = [f"{name} is {found!r}, not {value!r}" for name, found, value in wanted if found != value]
    return [*out, "moe balance is 'bias', which selects experts by it"] if moe.balance == "bias" else out


def write(params: ModelParams, moe: MoEConfig, base: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model without `differences`; `base`: the config it was converted from, or {}."""
    ours = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": params.vocab_size,
        "hidden_size": params.dim,
        "intermediate_size": moe.hidden_dim(params.dim),
        "num_hidden_layers": params.n_layers,
        "num_attention_heads": params.n_heads,
        "num_key_value_heads": params.kv_heads,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": params.norm_eps,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "tie_word_embeddings": False,
        # for transformers 4 and 5
        "rope_theta": params.rope_theta,
        "rope_parameters": {"rope_theta": params.rope_theta, "rope_type": "default"},
    }
    more = {} if base else {"sliding_window": None, "max_position_embeddings": params.seq_len}
    return {**base, **ours, **more}


def links(params: ModelParams, moe: MoEConfig, stacked: bool) -> list[Link]:
    """Which tensor is which. `stacked`: by transformers 5's own names, one tensor for all experts of a layer."""
    out = [
        Link("tok_embeddings.weight", "model.embed_tokens.weight"),
        Link("norm.weight", "model.norm.weight"),
        Link("output.weight", "lm_head.weight"),
    ]
    q, kv = params.n_heads * params.head_dim, params.kv_heads * params.head_dim
    for layer in range(params.n_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
        out += [
            Link(f"{ours}.attention.in_proj.weight", f"{theirs}.self_attn.{part}_proj.weight", (where,))
            for part, where in rows.items()
        ]
        out += [
            Link(f"{ours}.attention.out_proj.weight", f"{theirs}.self_attn.o_proj.weight"),
            Link(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
            Link(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
        ]
        out += _expert_links(f"{ours}.feed_forward", theirs, moe.num_experts, moe.hidden_dim(params.dim), stacked)
    return out


def _expert_links(ours: str, theirs: str, n_experts: int, hidden: int, stacked: bool) -> list[Link]:
    """Ours are w1 (E, D, 2F), gate half first, and w2 (E, F, D); theirs have outputs before inputs."""
    w1, w2 = f"{ours}.experts.w1", f"{ours}.experts.w2"
    if stacked:
        return [
            Link(f"{ours}.router.weight", f"{theirs}.mlp.gate.weight"),
            Link(w1, f"{theirs}{STACKED}", transposed=True),
            Link(w2, f"{theirs}.mlp.experts.down_proj", transposed=True),
        ]
    block = f"{theirs}.block_sparse_moe"
    out = [Link(f"{ours}.router.weight", f"{block}.gate.weight")]
    for part, name, columns in (("w1", w1, slice(0, hidden)), ("w3", w1, slice(hidden, 2 * hidden)), ("w2", w2, None)):
        for expert in range(n_experts):
            where = (expert,) if columns is None else (expert, slice(None), columns)
            out.append(Link(name, f"{block}.experts.{expert}.{part}.weight", where, transposed=True))
    return out
