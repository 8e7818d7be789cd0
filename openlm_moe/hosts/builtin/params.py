"""What a model is made of: open_lm's JSON schema, its names, and the flags that fill what the JSON leaves open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.options import Option

CONFIGS = Path(__file__).parent / "configs"
NORMS = (
    "default_layer_norm",
    "lp_layer_norm",
    "gain_only_lp_layer_norm",
    "gain_only_layer_norm",
    "no_wb_layer_norm",
    "rms_norm",
)
POSITIONS = ("rotary", "head_rotary", "llama_rotary", "none")
FFN_TYPES = ("swiglu", "swiglu_torch", "gelu", "gemma_geglu")

_RULE = "a value in the model's JSON wins"
MODEL_OPTIONS: tuple[Option, ...] = (
    Option("--model", "open_lm's model name, or a JSON file in its schema", group="model"),
    Option("--model-norm", f"kind of normalisation; {_RULE}", default=NORMS[0], choices=NORMS, group="model"),
    Option("--qk-norm", f"normalise queries and keys over all heads; {_RULE}", bool, False, group="model"),
    Option(
        "--positional-embedding-type", f"positions; {_RULE}", default=POSITIONS[0], choices=POSITIONS, group="model"
    ),
    Option("--ffn-type", f"dense feed-forward; {_RULE}", default=FFN_TYPES[0], choices=FFN_TYPES, group="model"),
)
FLAGS = tuple(option.dest for option in MODEL_OPTIONS[1:])


@dataclass(frozen=True)
class ModelParams:
    """Shape and kind of a decoder, under open_lm's names. `head_dim` is dim // n_heads even where that leaves a rest.

    Raises `UserError` for values that no model can be built with.
    """

    dim: int
    n_layers: int
    n_heads: int
    seq_len: int
    vocab_size: int
    post_embed_norm: bool = False
    weight_tying: bool = False
    model_norm: str = NORMS[0]
    norm_eps: float = 1e-5
    qk_norm: bool = False
    positional_embedding_type: str = POSITIONS[0]
    rope_theta: float = 10000.0
    ffn_type: str = FFN_TYPES[0]
    n_kv_heads: int | None = None  # None: as many as query heads

    def __post_init__(self) -> None:
        for name, allowed in (
            ("model_norm", NORMS),
            ("positional_embedding_type", POSITIONS),
            ("ffn_type", FFN_TYPES),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in ("dim", "n_layers", "n_heads", "seq_len", "vocab_size"):
            self._require(getattr(self, name) >= 1, name, "1 or more")
        self._require(self.norm_eps > 0, "norm_eps", "above 0")
        self._require(self.rope_theta > 0, "rope_theta", "above 0")
        self._require(self.head_dim >= 1, "n_heads", f"at most the model's dim, {self.dim}")
        if self.positional_embedding_type != "none":
            self._require(
                self.head_dim % 2 == 0,
                "n_heads",
                f"such that dim // n_heads is even for {self.positional_embedding_type} positions, and {self.dim} // "
                f"{self.n_heads} is {self.head_dim}",
            )
        if self.n_kv_heads is not None:
            divides = self.n_kv_heads >= 1 and self.n_heads % self.n_kv_heads == 0
            self._require(divides, "n_kv_heads", f"a divisor of n_heads, {self.n_heads}")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise UserError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def to_json(self) -> dict[str, Any]:
        """Plain values under the JSON schema's keys; `load_model` reads them back."""
        values = asdict(self)
        if self.n_kv_heads is None:
            del values["n_kv_heads"]
        return {"hidden_dim": values.pop("dim"), **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelParams:
        """The inverse of `to_json`."""
        return cls(**{_MODEL_KEYS[key]: value for key, value in values.items()})


def model_names() -> list[str]:
    """Every name that `--model` knows, smallest model first."""
    return sorted((path.stem for path in CONFIGS.glob("*.json")), key=lambda name: (_size(name), name))


def _size(name: str) -> int:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    return values["n_layers"] * values["hidden_dim"] ** 2


def read_model_json(model: str) -> dict[str, Any]:
    """The JSON behind a model name or path. Raises `UserError` for an unknown name, a broken file or an unknown key."""
    path = Path(model) if model.endswith(".json") else CONFIGS / f"{model}.json"
    if not path.is_file():
        if model.endswith(".json"):
            raise UserError(f"model file {model} does not exist; give an existing JSON file or a model name")
        raise UserError(f"unknown model {model!r}; known are {', '.join(model_names())}, or give a JSON file")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model file {path} is not valid JSON ({error}); correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"model file {path} holds a {type(values).__name__}; it must hold one JSON object")
    _check_keys(values, path.name)
    return values


# Key of the JSON -> field of ModelParams.
_MODEL_KEYS = {"hidden_dim" if f.name == "dim" else f.name: f.name for f in fields(ModelParams)}
_REQUIRED = ("hidden_dim", "n_layers", "n_heads", "seq_len", "vocab_size")
# Key of the JSON -> field of MoEConfig: `moe_` and the field's name, and open_lm's one other name.
_MOE_KEYS = {
    "moe_freq": "every",
    **{f.name if f.name.startswith("moe_") else f"moe_{f.name}": f.name for f in fields(MoEConfig)},
}
# open_lm allows these in the JSON although they say how to lay a model out over devices, not what it is.
_LAYOUT_KEYS = {
    "moe_expert_model_parallelism": "say --expert-parallel on the command line instead",
    "moe_weight_parallelism": "FSDP shards the experts' weights; remove the key",
}


def _check_keys(values: Mapping[str, Any], name: str) -> None:
    known = (*_MODEL_KEYS, *_MOE_KEYS)
    for key, value in values.items():
        if key in _LAYOUT_KEYS:
            if value:
                raise UserError(f"{name} sets {key}, which a model file cannot: {_LAYOUT_KEYS[key]}")
        elif key not in known:
            raise UserError(f"{name} has the unknown key {key!r}; known are {', '.join(sorted(known))}")
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise UserError(f"{name} lacks the key {missing[0]!r}, which every model needs")


def load_model_params(model: str, flags: Mapping[str, Any] | None = None) -> ModelParams:
    """Reads a model name or JSON file; `flags` (names in `FLAGS`) fill what it leaves open. Raises `UserError`."""
    values = read_model_json(model)
    chosen = {key: value for key, value in (flags or {}).items() if key in FLAGS and value is not None}
    for key, field in _MODEL_KEYS.items():
        if key in values:
            chosen[field] = _typed(ModelParams, field, key, values[key])
    return ModelParams(**chosen)


def load_model(model: str, flags: Mapping[str, Any], moe: MoEConfig) -> tuple[ModelParams, MoEConfig]:
    """Model and MoE settings of a name or JSON file, whose values win over `flags` and `moe`. Raises `UserError`."""
    merged = moe.to_dict()
    for key, value in read_model_json(model).items():
        if key == "moe_freq" and value == 0:
            merged["num_experts"] = 0  # open_lm's way to say dense
        elif key in _MOE_KEYS:
            merged[_MOE_KEYS[key]] = _typed(MoEConfig, _MOE_KEYS[key], key, value)
    return load_model_params(model, flags), MoEConfig.from_dict(merged)


def _typed(owner: type, field: str, key: str, value: Any) -> Any:
    """`value` if it has the type that `owner` declares for `field`; a whole number passes as a float."""
    kinds = {"int": int, "float": float, "bool": bool, "str": str, "tuple[int, ...]": list, "None": type(None)}
    declared = next(f.type for f in fields(owner) if f.name == field)
    allowed = [kinds[name] for name in str(declared).split(" | ")]
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed:
        raise UserError(f"the model's {key} is {value!r}; it must be of type {allowed[0].__name__}")
    return value
