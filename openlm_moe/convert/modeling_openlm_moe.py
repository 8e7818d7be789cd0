"""A mixture-of-experts language model trained with openlm-moe, for transformers 4.57 and later.

Everything is in this file; it needs torch and transformers. Load the folder that it lies in with

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The model is a decoder with norms before attention and feed-forward, rotary positions and, in the blocks named by
`moe_layers`, experts as feed-forward: a router (always fp32) sends each token to its `num_experts_per_tok` best
experts. No token is dropped, so a token's output depends on those before it alone. Training losses that balance the
experts are not computed here.

Shapes: B samples, S positions, T = B*S tokens, D model dim, F expert hidden dim, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# What transformers calls the key-value cache: past_key_values, and cache in late releases of 5.
CACHE = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))


class OpenLMMoeConfig(PretrainedConfig):
    """Shape and kind of the model.

    norm: "rms_norm", "default_layer_norm" (gain and bias), "gain_only_layer_norm" or "no_wb_layer_norm"; "lp_" before
        "layer_norm" says how it was trained and changes nothing here.
    qk_norm: normalise queries and keys over all heads together.
    positions: "rotary" turns pairs (i, i + head_dim/2), "llama_rotary" pairs (2i, 2i + 1), "head_rotary" turns by the
        head's number in place of the position, "none" not at all; by angles position * rotary_base^(-2i/head_dim).
    dense_ffn: "swiglu", "swiglu_torch", "gelu" or "gemma_geglu", in the blocks without experts.
    expert_ffn: "swiglu" or "gelu" (tanh approximation).
    score: "softmax" or "sigmoid" of the router's logits; normalize_weights: the K chosen scores are made to sum to 1.
    expert_bias: the router has a bias that takes part in the choice of experts alone.
    shared_experts: experts that every token passes besides.
    """

    model_type = "openlm_moe"

    def __init__(
        self,
        vocab_size: int = 50432,
        hidden_size: int = 288,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int = 12,
        max_position_embeddings: int = 2048,
        norm: str = "default_layer_norm",
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        post_embed_norm: bool = False,
        positions: str = "rotary",
        rotary_base: float = 10000.0,
        dense_ffn: str = "swiglu",
        dense_ffn_dim: int = 768,
        moe_layers: tuple[int, ...] | list[int] = (0, 2, 4, 6, 8, 10),
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        expert_ffn: str = "gelu",
        expert_ffn_dim: int = 1152,
        shared_experts: int = 0,
        score: str = "softmax",
        normalize_weights: bool = False,
        expert_bias: bool = False,
        tie_word_embeddings: bool = False,
        **more: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.norm = norm
        self.norm_eps = norm_eps
        self.qk_norm = qk_norm
        self.post_embed_norm = post_embed_norm
        self.positions = positions
        self.rotary_base = rotary_base
        self.dense_ffn = dense_ffn
        self.dense_ffn_dim = dense_ffn_dim
        self.moe_layers = list(moe_layers)
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.expert_ffn = expert_ffn
        self.expert_ffn_dim = expert_ffn_dim
        self.shared_experts = shared_experts
        self.score = score
        self.normalize_weights = normalize_weights
        self.expert_bias = expert_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


class Norm(nn.Module):
    """RMS or layer normalisation over the last dimension."""

    def __init__(self, config: OpenLMMoeConfig, dim: int) -> None:
        super().__init__()
        kind = config.norm.replace("lp_", "")
        self.dim, self.eps, self.is_rms = dim, config.norm_eps, kind == "rms_norm"
        self.weight = None if kind == "no_wb_layer_norm" else nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind in ("default_layer_norm", "layer_norm") else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_rms:
            return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, position_ids: Tensor, config: OpenLMMoeConfig) -> Tensor:
    """Rotates x (B, S, heads, head_dim) by its positions (B, S), in fp32."""
    if config.positions == "none":
        return x
    if config.positions == "head_rotary":
        places = torch.arange(x.shape[2], device=x.device)[None, None, :]
    else:
        places = position_ids[:, :, None]
    exponents = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32) / x.shape[-1]
    angles = places[..., None].float() * (1.0 / config.rotary_base**exponents)
    cos, sin = angles.cos(), angles.sin()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if config.positions == "llama_rotary":
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention. `in_proj` holds the rows of queries, keys and values, in this order."""

    def __init__(self, config: OpenLMMoeConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.q_dim, self.kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.in_proj = nn.Linear(config.hidden_size, self.q_dim + 2 * self.kv_dim, bias=False)
        self.out_proj = nn.Linear(self.q_dim, config.hidden_size, bias=False)
        self.q_norm = Norm(config, self.q_dim) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(config, self.kv_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """x (B, S, D) -> (B, S, D). mask (B, 1, S, keys): True where a query sees a key; None for causal."""
        q, k, v = self.in_proj(x).split((self.q_dim, self.kv_dim, self.kv_dim), dim=-1)
        q = self.q_norm(q).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_norm(k).unflatten(-1, (self.kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = (rotate(t, position_ids, self.config) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return self.out_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """w3(silu(gate) * up), with gate and up from one matrix, gate half first."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class GemmaGeGLU(nn.Module):
    """down(gelu(gate(x)) * up(x)), with biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden)
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def dense_feed_forward(config: OpenLMMoeConfig) -> nn.Module:
    """The feed-forward of a block without experts."""
    dim, hidden = config.hidden_size, config.dense_ffn_dim
    if config.dense_ffn == "gelu":
        return nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.GELU(), nn.Linear(hidden, dim, bias=False))
    return (GemmaGeGLU if config.dense_ffn == "gemma_geglu" else SwiGLU)(dim, hidden)


def activate(hidden: Tensor, kind: str) -> Tensor:
    """The experts' activation: (rows, F) or, for SwiGLU with the gate half first, (rows, 2F) -> (rows, F)."""
    if kind == "swiglu":
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(hidden, approximate="tanh")


class Router(nn.Module):
    """Chooses experts and their weights for each token, in fp32: in bf16, near-ties go to other experts."""

    def __init__(self, config: OpenLMMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.expert_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, D) -> weights (T, K) and ids (T, K) of the chosen experts."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
        ranked = scores if self.expert_bias is None else scores + self.expert_bias.to(dtype)
        ids = ranked.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.config.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ids


class Experts(nn.Module):
    """Feed-forwards stacked as w1 (E, D, F), for SwiGLU (E, D, 2F), and w2 (E, F, D)."""

    def __init__(self, config: OpenLMMoeConfig) -> None:
        super().__init__()
        self.kind = config.expert_ffn
        E, D, hidden = config.num_experts, config.hidden_size, config.expert_ffn_dim
        self.w1 = nn.Parameter(torch.empty(E, D, hidden * (2 if self.kind == "swiglu" else 1)))
        self.w2 = nn.Parameter(torch.empty(E, hidden, D))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, D) -> (T, D): for each token the weighted sum of its experts' outputs."""
        out = torch.zeros_like(x, dtype=weights.dtype)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            y = activate(x[token] @ self.w1[expert], self.kind) @ self.w2[expert]
            out.index_add_(0, token, y.to(out.dtype) * weights[token, slot, None])
        return out.to(x.dtype)


class SharedExperts(nn.Module):
    """Experts that every token passes, as one wide feed-forward."""

    def __init__(self, config: OpenLMMoeConfig) -> None:
        super().__init__()
        self.kind = config.expert_ffn
        width = config.shared_experts * config.expert_ffn_dim
        self.w1 = nn.Parameter(torch.empty(width * (2 if self.kind == "swiglu" else 1), config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(config.hidden_size, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(activate(F.linear(x, self.w1), self.kind), self.w2)


class MoE(nn.Module):
    """Router, experts and, if there are any, shared experts."""

    def __init__(self, config: OpenLMMoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SharedExperts(config) if config.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        tokens = x.flatten(0, 1)
        out = self.experts(tokens, *self.router(tokens))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


class Block(nn.Module):
    """x + attention(norm(x)), then + feed_forward(norm(.))."""

    def __init__(self, config: OpenLMMoeConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config, config.hidden_size)
        self.attention = Attention(config, layer)
        self.ffn_norm = Norm(config, config.hidden_size)
        self.feed_forward = MoE(config) if layer in config.moe_layers else dense_feed_forward(config)

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        h = x + self.attention(self.attention_norm(x), position_ids, mask, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class OpenLMMoeForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its head."""

    config_class = OpenLMMoeConfig
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["Block"]
    _tied_weights_keys: ClassVar = {"output.weight": "tok_embeddings.weight"}
    _keep_in_fp32_modules_strict: ClassVar = ["router"]

    def __init__(self, config: OpenLMMoeConfig) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.tok_embeddings = nn.Embedding(config.vocab_size, dim)
        self.post_embed_norm = Norm(config, dim) if config.post_embed_norm else nn.Identity()
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config, dim)
        self.output = nn.Linear(dim, config.vocab_size, bias=False)
        if not config.moe_layers:
            self._keep_in_fp32_modules_strict = []  # transformers 4 refuses names that no module has
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """For a model made from the config alone: normal with deviation 1/sqrt(model dim)."""
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.hidden_size**-0.5)

    def get_input_embeddings(self) -> nn.Module:
        return self.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tok_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.output = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Tokens (B, S) -> logits (B, S, vocab_size), those of the last `logits_to_keep` positions if that is set.

        attention_mask: (B, positions so far), 0 for padding, which no token sees; at either end.
        labels: (B, S), -100 to leave a position out; they are shifted here.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        x = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            position_ids = positions_of(x, past, attention_mask)
        mask = visible(x, past, attention_mask)
        x = self.post_embed_norm(x)
        for block in self.layers:
            x = block(x, position_ids, mask, cache)
        logits = self.output(self.norm(x[:, -logits_to_keep:] if logits_to_keep else x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})


def positions_of(x: Tensor, past: int, attention_mask: Tensor | None) -> Tensor:
    """Positions (B, S) of tokens x (B, S, D) after `past` others; padding does not count."""
    if attention_mask is None:
        return torch.arange(past, past + x.shape[1], device=x.device)[None, :].expand(x.shape[0], -1)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]


def visible(x: Tensor, past: int, attention_mask: Tensor | None) -> Tensor | None:
    """(B, 1, S, past + S), True where a query sees a key; None where plain causal attention says the same."""
    new, total = x.shape[1], past + x.shape[1]
    padded = attention_mask is not None and not bool(attention_mask.all())
    if not padded and (past == 0 or new == 1):
        return None
    queries = torch.arange(past, total, device=x.device)[:, None]
    keys = torch.arange(total, device=x.device)[None, :]
    seen = (keys <= queries)[None, None]
    if padded:
        # Padding sees itself: some attention kernels make NaN of a row without any key, and it would spread.
        seen = seen & (attention_mask[:, None, None, :total].bool() | (keys == queries))
    return seen
