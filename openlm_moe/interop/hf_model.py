"""A Hugging Face mixture of experts as a model to train: what it is, its module, and its own auxiliary loss.

`HFModel` is called as the trainer calls its models, tokens to logits, and computes its experts with our grouped GEMMs
(see hf_experts.py). Weights in and out are in hf_model_files.py.

Shapes: B samples, S positions, V vocabulary, T = B*S tokens, E experts, K top-k.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.interop.hf_experts import NAME, fused_activation, register
from openlm_moe.layers.losses import LayerStats, LossCollector, count_tokens

# names in the families' configs; the first present wins
TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k")


class HFModel(nn.Module):
    """A causal language model of transformers, called as tokens (B, S), mask (B, S) or None -> logits (B, S, V).

    Attention and the model's auxiliary loss leave out what `mask` marks False.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.coefficient = auxiliary_coefficient(model)
        self.losses: HFLosses | None = None  # open during a micro-batch of training: see `collect_hf_losses`
        for name, experts in experts_of(model):
            experts.register_forward_pre_hook(self._counter(f"model.{name}", experts.num_experts), with_kwargs=True)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers."""
        return decoder_layers(self.model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """fp32 logits (fp64 for fp64 weights). With open `losses` in training, their gradient includes the auxiliary's.

        The formula is the family's own: its forward computes it from its router logits.
        """
        with_loss = self.losses is not None and self.training and self.coefficient > 0
        asked: dict[str, Any] = {"output_router_logits": True} if with_loss else {}
        mask = None if mask is None else mask.long()
        out = self.model(input_ids=tokens, attention_mask=mask, use_cache=False, **asked)
        logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
        return self.losses.take(logits, self.coefficient * out.aux_loss) if with_loss else logits

    def set_grad_checkpointing(self) -> None:
        """Recompute whole decoder layers in backward."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # late releases of 5 prefer a name that early ones lack
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _counter(self, name: str, num_experts: int) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.losses is not None:  # a recomputed layer says the same again
                ids_TK = args[1] if len(args) > 1 else kwargs["top_k_index"]
                self.losses.count(name, count_tokens(ids_TK, num_experts)[0])

        return count


class HFLosses(LossCollector):
    """`LossCollector` of a model with one auxiliary loss over all its layers together."""

    def __init__(self, share: float, scale: float) -> None:
        super().__init__({}, share, scale, None)
        self._auxiliary = torch.zeros(())

    @property
    def load_balancing_loss(self) -> Tensor:
        """The model's auxiliary loss times its coefficient."""
        return self._auxiliary

    def take(self, logits: Tensor, loss: Tensor) -> Tensor:
        """`logits`, whose backward also sends the gradient of the weighted `loss` into the graph."""
        self._auxiliary = loss.detach()
        return self.attach(logits, loss)

    def count(self, name: str, tokens_per_expert_E: Tensor) -> None:
        zero = tokens_per_expert_E.new_zeros(())
        self.per_layer[name] = LayerStats(tokens_per_expert_E, zero, zero, zero)


@contextmanager
def collect_hf_losses(
    model: HFModel, *, share: float = 1.0, scale: float = 1.0, reduce_counts: None = None
) -> Iterator[HFLosses]:
    """As `openlm_moe.collect_losses`, of the auxiliary loss and the expert load of a Hugging Face model."""
    model.losses = HFLosses(share, scale)
    try:
        yield model.losses
    finally:
        model.losses = None


@dataclass(frozen=True)
class HFCount:
    """Numbers of parameters; `active` leaves out the experts that a token is not sent to."""

    total: int
    active: int


@dataclass(frozen=True)
class HFDescription:
    """What a folder's config.json describes."""

    folder: Path
    config: Any
    seq_len: int  # tokens of a training sample
    dim: int
    vocab_size: int
    moe: MoEConfig  # its experts in our words; the model's own code routes
    count: HFCount
    flops_per_token: float  # as `hosts.builtin.count.flops_per_token` counts

    def to_json(self) -> dict[str, Any]:
        """What tells one architecture from another, as JSON values."""
        return {"family": self.config.model_type, **_architecture(self.config)}


def describe(folder: Path, seq_len: int | None = None) -> HFDescription:
    """Reads config.json and builds the model on the meta device. No weight is read and no code of the folder is run.

    seq_len: tokens of a sample; None for all that the model has positions for. Raises `UserError` for a folder that is
    no mixture of experts of transformers, or that cannot be trained on such samples.
    """
    register()
    config = read_config(folder)
    limit = getattr(_text(config), "max_position_embeddings", None)
    if seq_len is None and limit is None:
        raise UserError(f"{folder / 'config.json'} has no max_position_embeddings; give --hf-seq-len")
    if seq_len is not None and limit is not None and seq_len > limit:
        raise UserError(f"--hf-seq-len is {seq_len}, but {folder} has positions for {limit} tokens; lower it")
    model = build_on_meta(config)
    experts = [module for _, module in experts_of(model)]
    if not experts:
        raise UserError(f"{folder} is a {config.model_type} without experts in transformers' experts interface")
    seq_len = limit if seq_len is None else seq_len
    moe = _moe_config(model, folder)
    dim, count = _text(config).hidden_size, _count(model, moe)
    flops = _flops_per_token(model, count, seq_len)
    return HFDescription(folder, config, seq_len, dim, _text(config).vocab_size, moe, count, flops)


def read_config(folder: Path) -> Any:
    """transformers' config of a folder. Raises `UserError`."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no folder with a config.json; download the model and name its folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be used: {str(error).splitlines()[0]}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{folder} holds quantized weights, which cannot be trained; give unquantized ones")
    return config


def build_on_meta(config: Any) -> nn.Module:
    """The model without storage, in fp32, with our experts."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=NAME)
    except ValueError as error:
        raise UserError(f"{config.model_type} cannot be trained: {str(error).splitlines()[0]}") from None


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that transformers' experts interface dispatches, with their names."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists that hold experts."""
    experts = {module for _, module in experts_of(model)}
    out: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside and experts & set(module.modules()):
            out += list(module)
            inside |= set(module.modules())
    return out


def layer_ids(model: nn.Module) -> dict[str, int]:
    """Name of each experts module -> number of the decoder layer that it is in."""
    numbers = {part: number for number, layer in enumerate(decoder_layers(model)) for part in layer.modules()}
    return {name: numbers[module] for name, module in experts_of(model)}


def auxiliary_coefficient(model: nn.Module) -> float:
    """The weight of the model's own auxiliary loss; 0 for a family whose forward computes none."""
    computes = "output_router_logits" in inspect.signature(model.forward).parameters
    return float(getattr(_text(model.config), "router_aux_loss_coef", None) or 0.0) if computes else 0.0


def _text(config: Any) -> Any:
    return config.get_text_config()


def _moe_config(model: nn.Module, folder: Path) -> MoEConfig:
    config = _text(model.config)
    top_k = next((getattr(config, name) for name in TOP_K_NAMES if getattr(config, name, None)), None)
    if top_k is None:
        raise UserError(f"{folder / 'config.json'} has none of {', '.join(TOP_K_NAMES)}")
    first = experts_of(model)[0][1]
    coefficient = auxiliary_coefficient(model)
    return MoEConfig(
        num_experts=first.num_experts,
        top_k=top_k,
        layers=tuple(layer_ids(model).values()),
        ffn=fused_activation(first) or "swiglu",
        ffn_dim=first.down_proj.shape[1 if first.is_transposed else 2],
        balance="loss" if coefficient else "none",
        loss_weight=coefficient,
    )


def _count(model: nn.Module, moe: MoEConfig) -> HFCount:
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for _, module in experts_of(model) for p in module.parameters())
    return HFCount(total, total - experts + round(experts * moe.top_k / moe.num_experts))


def _flops_per_token(model: nn.Module, count: HFCount, seq_len: int) -> float:
    """2 for each active weight of a matrix in forward, and attention scores; twice as much in backward."""
    config = _text(model.config)
    embedding = model.get_input_embeddings().weight
    looked_up = 0 if embedding is model.get_output_embeddings().weight else embedding.numel()
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    scores = 2 * len(decoder_layers(model)) * heads * head_dim * (seq_len + 1)
    return 3.0 * (2 * (count.active - looked_up - vectors) + scores)


# What two folders of one architecture may differ in.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "model_type"}
_INCIDENTAL |= {"router_aux_loss_coef", "output_router_logits", "use_cache", "_experts_implementation_internal"}


def _architecture(config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _INCIDENTAL}
