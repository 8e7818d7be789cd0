"""The MoE layer in a training loop of your own: `python -m openlm_moe.example_training_loop`.

A character-level language model whose second block has 8 experts learns the source of two of Python's own modules.
Nothing here needs this project's trainer; copy it and change it.

What the layer asks of a training loop is in `train`:
- open `collect_losses` around forward and backward of each micro-batch, with the micro-batch's share of the step;
- call backward on the cross-entropy alone: the balancing loss enters the gradients by itself;
- log `collector.per_layer`, the tokens that each expert got.

Shapes: B sequences, S positions, D model dim, V vocabulary, E experts.
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe import MoEConfig, build_moe, collect_losses

SEQ_LEN, MICRO_BATCH, ACCUMULATE = 64, 8, 2


class Block(nn.Module):
    """A pre-norm transformer block; its feed-forward is given."""

    def __init__(self, dim: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads, self.feed_forward = heads, feed_forward
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x_BSD)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSD = x_BSD + self.out(attended)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Model(nn.Module):
    """Two blocks, the second with experts in place of its feed-forward."""

    def __init__(self, vocab: int, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(SEQ_LEN, dim)
        dense = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        moe = build_moe(dim, layer_id=1, config=config)
        moe.init_weights(seed=0)
        self.blocks = nn.ModuleList([Block(dim, 4, dense), Block(dim, 4, moe)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed(tokens_BS) + self.position.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))  # (B, S, V)


def text() -> str:
    """Something to learn, on every machine."""
    return "\n".join(inspect.getsource(module) for module in (argparse, inspect))


def train(steps: int) -> list[float]:
    """Trains for `steps` optimizer steps; the cross-entropy of each, in nats per character."""
    torch.manual_seed(0)
    characters = sorted(set(text()))
    data_N = torch.tensor([characters.index(c) for c in text()])
    model = Model(len(characters), dim=64, config=MoEConfig(num_experts=8, top_k=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of_step = 0.0
        for _ in range(ACCUMULATE):
            starts_B = torch.randint(len(data_N) - SEQ_LEN - 1, (MICRO_BATCH,))
            tokens = data_N[starts_B[:, None] + torch.arange(SEQ_LEN + 1)]
            with collect_losses(model, share=1 / ACCUMULATE) as collector:
                logits_BSV = model(tokens[:, :-1])
                loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATE
                loss.backward()
            loss_of_step += loss.item()
        optimizer.step()
        losses.append(loss_of_step)
        if step % 20 == 0 or step == steps - 1:
            load_E = next(iter(collector.per_layer.values())).tokens_per_expert_E
            print(
                f"step {step:4d}  loss {loss_of_step:.3f}  balancing loss {collector.load_balancing_loss.item():.3f}"
                f"  tokens per expert {load_E.tolist()}"
            )
    return losses


if __name__ == "__main__":
    train(200)
