"""`python -m openlm_moe.interop.hf_families`: which MoE families of the installed transformers our experts serve.

Each family that uses the experts interface is built tiny with random weights and run with its own eager experts and
with ours: logits and every parameter's gradient must agree. Prints a Markdown table.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openlm_moe.interop.hf_experts import fused_activation, register, why_not

# Sizes that no tile divides and that tell any two dimensions apart. A config takes those of its own names.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "expert_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "mamba_d_state": 4,
    "mamba_d_conv": 2,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
}
# What single families need beside that.
OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["attention", "attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [20, 20]},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"]},
    "qwen4_exp": {"layer_types": ["linear_attention", "linear_attention"]},
    "mistral4": {"head_dim": 16},
    "glm_moe_dsa": {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4},
    "deepseek_v32": {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4},
}
# Parts of these models' experts or mixers compute in fp32 whatever the dtype, so fp64 shows fp32 rounding.
FP32_ONLY = ("beam", "inkling2", "inkling2_loop", "muse_spark", "nemotron_h")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Status:
    """What became of one family."""

    family: str
    verdict: str  # "equal", "different", "falls back" or "not built"
    detail: str
    logits_error: float | None = None
    gradient_error: float | None = None


def families() -> list[str]:
    """Every family of the installed transformers whose model file uses the experts interface."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    files = root.glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if "@use_experts_implementation" in file.read_text()})


def model_class(family: str) -> type[nn.Module]:
    """The family's causal language model, or else its text model. LookupError when it has neither."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    for ending in ("ForCausalLM", "TextModel", "ThinkerTextModel"):
        for candidate in own:
            if candidate.__name__.endswith(ending) and getattr(candidate, "config_class", None) is not None:
                return candidate
    raise LookupError("it has no text model that runs alone")


def tiny_config(family: str, **settings: Any) -> Any:
    """A two-layer config of the family, with experts in both layers where it lets one choose."""
    config_class = model_class(family).config_class
    defaults = config_class()
    defaults.allow_global_per_layer_attribute_access = True
    values = {name: size for name, size in SIZES.items() if hasattr(defaults, name)}
    if hasattr(defaults, "kv_lora_rank"):  # latent attention has no groups, and rotates its own part of a head
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["head_dim"] = values["qk_rope_head_dim"]
    for name in ("layer_types", "mlp_layer_types"):
        if hasattr(defaults, name) and not isinstance(getattr(config_class, name, None), property):
            kinds = getattr(defaults, name) or ["full_attention"]
            values[name] = ["sparse", "sparse"] if name == "mlp_layer_types" else [kinds[0], kinds[-1]]
    return config_class(**{**values, **OVERRIDES.get(family, {}), **settings})


def tiny_model(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    """A tiny random model of the family, in evaluation mode. `settings` override config values."""
    torch.manual_seed(0)
    model = model_class(family)(tiny_config(family, **settings)).to(dtype).eval()
    for parameter in model.parameters():
        if not parameter.isfinite().all():  # some are left uninitialised
            nn.init.normal_(parameter, std=0.02)
    return model


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that the experts interface dispatches."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def run(model: nn.Module, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one batch under an experts implementation."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    tokens = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    output = model(tokens)
    output = output.logits if hasattr(output, "logits") else output.last_hidden_state
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    (output * weights).sum().backward()
    return output.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check(family: str, dtype: torch.dtype | None = None, **settings: Any) -> Status:
    """Compares our experts with the family's own; `dtype` defaults to fp64 where the family computes in it."""
    name = register()
    dtype = dtype or (torch.float32 if family in FP32_ONLY else torch.float64)
    try:
        model = tiny_model(family, dtype, **settings)
        modules = experts_modules(model)
        if not modules:
            return Status(family, "not built", "the tiny config has no MoE layer")
        want, want_gradients = run(model, "eager")
    except Exception as error:  # whatever a model file raises when it is built tiny
        return Status(family, "not built", f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    if reason := why_not(modules[0]):
        return Status(family, "falls back", reason)
    got, gradients = run(model, name)
    logits_error = relative_error(got, want)
    gradient_error = max(relative_error(gradients[n], g) for n, g in want_gradients.items())
    equal = gradients.keys() == want_gradients.keys() and max(logits_error, gradient_error) <= BOUNDS[dtype]
    path = f"fused {fused_activation(modules[0])}" if fused_activation(modules[0]) else "composed"
    detail = f"{type(modules[0]).__name__}, {path}, {str(dtype).removeprefix('torch.')}"
    return Status(family, "equal" if equal else "different", detail, logits_error, gradient_error)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; 0 where both are 0."""
    difference, size = (got - want).norm().item(), want.norm().item()
    return difference / size if size else float(difference > 0)


def table(statuses: Sequence[Status]) -> str:
    """The Markdown table of results/hf_families.md."""
    version = importlib.metadata.version("transformers")
    served = sum(status.verdict == "equal" for status in statuses)
    lines = [
        "# Our experts in the MoE families of transformers",
        "",
        f"transformers {version}, torch {torch.__version__}, tiny random models on the CPU. With our experts, {served} "
        f"of {len(statuses)} families equal their own eager experts in logits and in every parameter's gradient.",
        "Made by `python -m openlm_moe.interop.hf_families`.",
        "",
        "| family | verdict | logits error | largest gradient error | how |",
        "|---|---|---|---|---|",
    ]
    for s in statuses:
        errors = ["" if e is None else f"{e:.0e}" for e in (s.logits_error, s.gradient_error)]
        lines.append(f"| {s.family} | {s.verdict} | {errors[0]} | {errors[1]} | {s.detail.replace('|', '/')} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Checks the named families, or all; returns 1 when one differs."""
    logging.disable(logging.WARNING)
    statuses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in names or families():
            with contextlib.redirect_stderr(io.StringIO()):
                statuses.append(check(family))
    print(table(statuses))
    return int(any(status.verdict == "different" for status in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
