"""The decoder: open_lm's shape and parameter names, with a MoE layer as feed-forward where the config says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openlm_moe import MoEConfig, MoELayer, UserError, build_moe, checkpoint, moe_layers
from openlm_moe.hosts.builtin.attention import Attention, KeyValues
from openlm_moe.hosts.builtin.feed_forward import make_feed_forward
from openlm_moe.hosts.builtin.initialise import initialise
from openlm_moe.hosts.builtin.norms import make_norm
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.hosts.builtin.rotary import Rotary

CHECKPOINTING = ("off", "block", "experts")


class Block(nn.Module):
    """x + attention(norm(x)), then + feed_forward(norm(.))."""

    def __init__(self, layer_id: int, params: ModelParams, moe: MoEConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = make_norm(params.model_norm, params.dim, params.norm_eps)
        self.attention = Attention(params, rotary)
        self.ffn_norm = make_norm(params.model_norm, params.dim, params.norm_eps)
        if layer_id in moe.moe_layer_ids(params.n_layers):
            self.feed_forward: nn.Module = build_moe(params.dim, layer_id, moe)
        else:
            self.feed_forward = make_feed_forward(params.ffn_type, params.dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: KeyValues | None = None) -> Tensor:
        """x (B, S, dim) -> the same shape; mask (B, S) is False for tokens that a MoE layer leaves out."""
        h = x + self.attention(self.attention_norm(x), cache)
        y = self.ffn_norm(h)
        return h + (self.feed_forward(y, mask) if isinstance(self.feed_forward, MoELayer) else self.feed_forward(y))


class Transformer(nn.Module):
    """Pre-norm decoder. Build it under `torch.device("meta")`, give it storage with `to_empty`, then `init_weights`."""

    def __init__(self, params: ModelParams, moe: MoEConfig) -> None:
        super().__init__()
        self.params, self.moe = params, moe
        self.rotary = Rotary(params.positional_embedding_type, params.head_dim, params.rope_theta)
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.post_embed_norm = (
            make_norm(params.model_norm, params.dim, params.norm_eps) if params.post_embed_norm else nn.Identity()
        )
        self.layers = nn.ModuleList(Block(i, params, moe, self.rotary) for i in range(params.n_layers))
        self.norm = make_norm(params.model_norm, params.dim, params.norm_eps)
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        self.checkpointing, self.use_reentrant = "off", False
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes embedding and head one parameter where the model says so; `to_empty` takes them apart."""
        if self.params.weight_tying:
            self.tok_embeddings.weight = self.output.weight

    def init_weights(self, seed: int) -> None:
        """Fills every parameter; values depend on `seed` and the parameter's name alone, not on the layout."""
        self.tie_weights()
        moe_names = tuple(f"{name}." for name, _ in moe_layers(self))
        for name, parameter in self.named_parameters():
            if not name.startswith(moe_names):
                initialise(parameter, name, self.params.dim, seed)
        for _, layer in moe_layers(self):
            layer.init_weights(seed)

    def set_grad_checkpointing(self, mode: str, use_reentrant: bool = False) -> None:
        """Recompute in backward: nothing ("off"), whole blocks ("block"), or the experts' hidden rows ("experts")."""
        if mode not in CHECKPOINTING:
            raise UserError(f"activation checkpointing is {mode!r}; it must be one of {', '.join(CHECKPOINTING)}")
        self.checkpointing, self.use_reentrant = mode, use_reentrant
        for _, layer in moe_layers(self):
            layer.checkpoint_experts = {"use_reentrant": use_reentrant} if mode == "experts" else None

    def new_cache(self) -> list[KeyValues]:
        """An empty key-value cache for `forward`."""
        return [KeyValues() for _ in self.layers]

    def forward(self, tokens: Tensor, mask: Tensor | None = None, cache: list[KeyValues] | None = None) -> Tensor:
        """tokens (B, S) -> logits (B, S, vocab_size), fp32 (fp64 for fp64 weights).

        mask: (B, S), False for padding, which no MoE layer routes or counts. Attention is causal and does not look at
            the mask: padding belongs at the right end.
        cache: from `new_cache`; `tokens` continue those that went through it before.
        """
        offset = 0 if cache is None else cache[0].length
        self.rotary.extend(max(offset + tokens.shape[1], self.params.n_heads), tokens.device)
        x = self.post_embed_norm(self.tok_embeddings(tokens))
        for i, block in enumerate(self.layers):
            if self.checkpointing == "block" and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=self.use_reentrant)
            else:
                x = block(x, mask, None if cache is None else cache[i])
        logits = self.output(self.norm(x))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
