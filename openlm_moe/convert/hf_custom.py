"""The custom Hugging Face model that any model of ours exports as: config.json for modeling_openlm_moe.py.

Its tensors have our names and shapes, so nothing is rearranged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.config import swiglu_hidden_dim
from openlm_moe.convert.hf_links import Link, independent, our_tensors
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import ModelParams

MODEL_TYPE = "openlm_moe"
CODE = "modeling_openlm_moe"
_CONFIG, _MODEL = "OpenLMMoeConfig", "OpenLMMoeForCausalLM"

# field of config.json -> ours; those of ModelParams first
_PARAMS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "seq_len",
    "norm": "model_norm",
    "norm_eps": "norm_eps",
    "qk_norm": "qk_norm",
    "post_embed_norm": "post_embed_norm",
    "positions": "positional_embedding_type",
    "rotary_base": "rope_theta",
    "dense_ffn": "ffn_type",
    "tie_word_embeddings": "weight_tying",
}
_MOE = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "expert_ffn": "ffn",
    "shared_experts": "shared_experts",
    "score": "score",
    "normalize_weights": "normalize_weights",
}


def refuse(moe: MoEConfig) -> None:
    """Raises `UserError` for layers whose output for a token depends on what else is in the batch."""
    if moe.num_experts and moe.moe_type != "dropless":
        raise UserError(
            f"moe_type is {moe.moe_type!r}: which tokens it drops depends on the batch, so no model on its own "
            "computes the same; only 'dropless' can be exported"
        )
    if moe.num_experts and moe.uniform_routing:
        raise UserError("uniform_routing is True: it routes by place in the batch, for measurements; do not export it")


def write(params: ModelParams, moe: MoEConfig, base: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model of ours; `base`: the config it was converted from, or {}."""
    refuse(moe)
    values = {theirs: getattr(params, ours) for theirs, ours in _PARAMS.items()}
    values |= {theirs: getattr(moe, ours) for theirs, ours in _MOE.items()}
    dense = 4 * params.dim if params.ffn_type == "gelu" else swiglu_hidden_dim(params.dim)
    return {
        **base,
        "model_type": MODEL_TYPE,
        "architectures": [_MODEL],
        "auto_map": {"AutoConfig": f"{CODE}.{_CONFIG}", "AutoModelForCausalLM": f"{CODE}.{_MODEL}"},
        **values,
        "dense_ffn_dim": dense,
        "expert_ffn_dim": moe.hidden_dim(params.dim),
        "moe_layers": list(moe.moe_layer_ids(params.n_layers)),
        "expert_bias": moe.balance == "bias",
    }


def read(config: dict[str, Any], seq_len: int | None) -> tuple[ModelParams, MoEConfig]:
    """Inverse of `write`. Raises `UserError` by field."""
    needed = (*_PARAMS, *_MOE, "expert_ffn_dim", "moe_layers", "expert_bias")
    missing = [field for field in needed if field not in config]
    if missing:
        raise UserError(f"config.json lacks {missing[0]}, which openlm-to-hf writes")
    values = {("n_kv_heads" if ours == "kv_heads" else ours): config[theirs] for theirs, ours in _PARAMS.items()}
    if seq_len is not None:
        values["seq_len"] = seq_len
    if values["n_kv_heads"] == values["n_heads"]:
        values["n_kv_heads"] = None
    layers = tuple(config["moe_layers"])
    moe = {ours: config[theirs] for theirs, ours in _MOE.items()}
    if not layers:
        moe["num_experts"] = 0
    every = next(
        (n for n in range(1, values["n_layers"] + 1) if tuple(range(0, values["n_layers"], n)) == layers), None
    )
    place = {"layers": layers or None} if every is None else {"every": every}
    if config["expert_bias"]:
        place["balance"] = "bias"
    try:
        return ModelParams(**values), MoEConfig(**moe, **place, ffn_dim=config["expert_ffn_dim"])
    except TypeError as error:
        raise UserError(f"config.json holds a value of the wrong type: {error}") from None


def links(params: ModelParams, moe: MoEConfig) -> list[Link]:
    """Every tensor is itself; a tied head is not in the files."""
    return [Link(name, name) for name in independent(our_tensors(params, moe), params)]


def copy_code(folder: Path) -> None:
    """Puts the model's code into `folder`."""
    shutil.copyfile(Path(__file__).with_name(f"{CODE}.py"), folder / f"{CODE}.py")
