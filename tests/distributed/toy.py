"""A small language model of somebody else's making that contains our MoE layer, and one process's training of it.

Imported by the programs beside it, which torchrun starts; they print one JSON line of findings from rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from openlm_moe import MoEConfig, build_moe, checkpoint, collect_losses, moe_layers
from openlm_moe.parallel import clip_grad_norm_, gradient_sync
from openlm_moe.parallel.state import full_tensor

VOCAB, DIM, LENGTH = 37, 16, 8


class Mixer(nn.Module):
    """Stands for attention: mixes positions causally."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)
        return self.out(torch.tanh(self.inner(x.cumsum(1) / positions[:, None])))


class Block(nn.Module):
    def __init__(self, layer_id: int, moe: MoEConfig | None) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.RMSNorm(DIM), Mixer(), nn.RMSNorm(DIM)
        self.ffn = build_moe(DIM, layer_id, moe) if moe else nn.Sequential(nn.Linear(DIM, 24), nn.Linear(24, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class ToyLM(nn.Module):
    """`pattern`: d for a dense block, m for one with a MoE layer."""

    def __init__(self, moe: MoEConfig, pattern: str = "dmmd") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(i, moe if kind == "m" else None) for i, kind in enumerate(pattern))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.checkpointing = ("off", False)

    def set_checkpointing(self, kind: str, use_reentrant: bool = False) -> None:
        self.checkpointing = (kind, use_reentrant)
        for _, layer in moe_layers(self):
            layer.checkpoint_experts = {"use_reentrant": use_reentrant} if kind == "experts" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        kind, reentrant = self.checkpointing
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if kind == "block" and self.training else block(x)
        return self.head(self.norm(x))


def build(moe: MoEConfig, dtype: torch.dtype = torch.float64, pattern: str = "dmmd", seed: int = 0) -> ToyLM:
    """The same weights on every rank."""
    model = ToyLM(moe, pattern)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.3 * values)
    return model.to(dtype)


def batch(step: int, sequences: int) -> Tensor:
    """Tokens (sequences, LENGTH + 1) of the whole step."""
    return torch.randint(VOCAB, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))


def share_of_rank(tokens: Tensor, rank: int, world: int) -> Tensor:
    """Uneven: rank 0 gets more sequences than the last rank."""
    sizes = [tokens.shape[0] // world] * world
    sizes[0], sizes[-1] = sizes[0] + 1 + tokens.shape[0] % world, sizes[-1] - 1
    return tokens.split(sizes)[rank] if world > 1 else tokens


def train_step(
    model: nn.Module, mine: Tensor, total: int, accumulation: int = 1, lazy: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Accumulates gradients of this rank's sequences; `total` counts the step's tokens over all ranks.

    lazy: gradients are reduced over ranks after the last micro-batch only.

    Returns this rank's part of the loss, and the gradients of the MoE layers' inputs: one (tokens, DIM) a layer.
    """
    loss_sum = torch.zeros((), dtype=torch.float64)
    grads: dict[str, list[Tensor]] = {name: [] for name, _ in moe_layers(model)}
    with watch_inputs(model, grads):
        for number, tokens in enumerate(mine.tensor_split(accumulation), 1):
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            last = not lazy or number == accumulation
            with gradient_sync(model, last), collect_losses(model, share=targets.numel() / total):
                logits = model(inputs)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / total
                loss.backward()
            loss_sum += loss.detach()
    return loss_sum, [torch.cat(parts) for parts in grads.values()]


@contextmanager
def watch_inputs(model: nn.Module, grads: dict[str, list[Tensor]]) -> Iterator[None]:
    handles = []
    for name, layer in moe_layers(model):

        def on_input(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args[0].requires_grad:
                args[0].register_hook(lambda grad: grads[name].append(grad.detach().flatten(0, -2).clone()))

        handles.append(layer.register_forward_pre_hook(on_input, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def worst(found: dict[str, Tensor] | list[Tensor], expected: dict[str, Tensor] | list[Tensor]) -> float:
    """Largest difference relative to each expected tensor's largest value. Infinite where a tensor is missing."""
    pairs = (
        zip(found, expected, strict=True)
        if isinstance(expected, list)
        else [(found.get(name), value) for name, value in expected.items()]
    )
    differences = []
    for a, b in pairs:
        if a is None or a.shape != b.shape:
            return float("inf")
        scale = max(b.abs().max().item(), 1e-30) if b.numel() else 1.0
        differences.append(((a.double() - b.double()).abs().max().item() / scale) if b.numel() else 0.0)
    return max(differences, default=0.0)


def sum_over_ranks(value: Tensor) -> Tensor:
    value = value.clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def max_over_ranks(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def same_on_all_ranks(value: Tensor) -> bool:
    if not dist.is_initialized():
        return True
    low, high = value.clone(), value.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


def norm_of(model: nn.Module) -> Tensor:
    return clip_grad_norm_(model.parameters(), None)


def main(program: Callable[[list[str]], dict[str, Any]]) -> None:
    """Runs `program(arguments)` in the process group that torchrun describes, and prints what it found."""
    import logging
    import warnings

    from openlm_moe.parallel import init_distributed, shutdown

    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    init_distributed(timeout_s=60)
    found = program(sys.argv[1:])
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
    shutdown()
