"""Sampling from a model: token by token with a key-value cache, the same continuation for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.model import Transformer


class Tokenizer(Protocol):
    """What `continue_text` needs; `tokenizers.Tokenizer` has it."""

    def encode(self, sequence: str) -> Any: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """`new_tokens` ids that continue `prompt`. temperature 0 takes the likeliest; top_k keeps the k likeliest.

    A prompt that leaves too little of the model's context loses its beginning. Every rank of a sharded model must call
    it, and all get the same ids. Raises `UserError` for an empty prompt or more new tokens than the context holds.
    """
    room = model.params.seq_len - new_tokens
    if not prompt or room < 1:
        raise UserError(
            f"cannot continue {len(prompt)} tokens by {new_tokens}: the prompt needs at least one token and the "
            f"context holds {model.params.seq_len}"
        )
    device = model.output.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache()
    step = torch.tensor([list(prompt)[-room:]], device=device)
    training = model.training
    model.eval()
    out: list[int] = []
    try:
        for _ in range(new_tokens):
            logits = model(step, cache=cache)[0, -1].float().cpu()
            out.append(sample(logits, temperature, top_k, generator))
            step = torch.tensor([[out[-1]]], device=device)
    finally:
        model.train(training)
    return out


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One id drawn from softmax(logits / temperature) over the `top_k` largest of `logits` (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def continue_text(model: Transformer, tokenizer: Tokenizer, prompt: str, new_tokens: int = 64, **how: Any) -> str:
    """`generate` from text to text; returns the continuation without the prompt."""
    return tokenizer.decode(generate(model, tokenizer.encode(prompt).ids, new_tokens, **how))
