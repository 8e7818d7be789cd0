"""Parameters and FLOPs of a model: in total, and for one token. Counted on the meta device: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openlm_moe import MoEConfig, moe_layers
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters of each kind. A head that is tied to the embedding counts as the head."""

    embedding: int
    head: int
    attention: int
    dense_ffn: int
    router: int
    experts: int  # all routed experts of all layers
    shared_experts: int
    norms: int
    top_k_share: float  # top_k / num_experts; 0 for a dense model

    @property
    def total(self) -> int:
        """What is trained, embedding and head included."""
        return self.matrices + self.embedding + self.norms + self.router + self.experts

    @property
    def matrices(self) -> int:
        """What every token is multiplied with, the router left out."""
        return self.head + self.attention + self.dense_ffn + self.shared_experts

    @property
    def active(self) -> int:
        """What one token uses: the parameters of this model with only top_k experts, as open_lm's table counts."""
        routed = round((self.router + self.experts) * self.top_k_share)
        return self.matrices + self.embedding + self.norms + routed


def build_on_meta(params: ModelParams, moe: MoEConfig) -> Transformer:
    """The model without storage."""
    with torch.device("meta"):
        return Transformer(params, moe)


def count_parameters(params: ModelParams, moe: MoEConfig) -> ParameterCount:
    """Counts the parameters of the model that would be trained, kind by kind."""
    model = build_on_meta(params, moe)
    moe_names = tuple(f"{name}." for name, _ in moe_layers(model))
    counts = dict.fromkeys(
        ("embedding", "head", "attention", "dense_ffn", "router", "experts", "shared_experts", "norms"), 0
    )
    seen = set()
    # The head first, so that a tied pair counts as the head.
    for name, parameter in [("output.weight", model.output.weight), *model.named_parameters()]:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            counts[_kind(name, moe_names)] += parameter.numel()
    return ParameterCount(**counts, top_k_share=moe.top_k / moe.num_experts if moe.num_experts else 0.0)


def _kind(name: str, moe_names: tuple[str, ...]) -> str:
    if name.startswith(moe_names):
        part = next(name.removeprefix(m) for m in moe_names if name.startswith(m)).split(".")[0]
        return {"router": "router", "experts": "experts", "shared": "shared_experts"}[part]
    if "_proj.weight" in name and "attention" in name:
        return "attention"
    if "feed_forward" in name:
        return "dense_ffn"
    return {"tok_embeddings.weight": "embedding", "output.weight": "head"}.get(name, "norms")


def forward_flops_per_token(params: ModelParams, moe: MoEConfig, count: ParameterCount) -> dict[str, float]:
    """{part of the model: FLOPs of its matrix multiplies for one token in forward}; 2 per weight that it meets.

    Attention scores count the keys that a causal query sees, (seq_len + 1) / 2 on average.
    """
    return {
        "attention projections": 2.0 * count.attention,
        "attention scores": 2.0 * params.n_layers * params.n_heads * params.head_dim * (params.seq_len + 1),
        "dense feed-forward": 2.0 * count.dense_ffn,
        "experts": 2.0 * (count.experts * count.top_k_share + count.shared_experts),
        "router": 2.0 * count.router,
        "head": 2.0 * count.head,
    }


def flops_per_token(params: ModelParams, moe: MoEConfig) -> float:
    """Active FLOPs of one token in training: forward, and twice as many in backward. Recomputation does not count.

    As PaLM's MFU (arXiv 2204.02311, appendix B) with active parameters, but half the attention scores, since causal
    attention needs no more; embedding lookup, norms and activations count nothing.
    """
    return 3 * sum(forward_flops_per_token(params, moe, count_parameters(params, moe)).values())


def short_count(number: float) -> str:
    """As the published table prints numbers of parameters: 68.9M, 1.0B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if round(number / size, 4) >= 1:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
