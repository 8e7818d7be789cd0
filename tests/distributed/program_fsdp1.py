"""FSDP1 with our wrap policy against one process. Argument: expert-parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import toy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from openlm_moe import MoEConfig, collect_losses, moe_layers
from openlm_moe.layers.base import clean_name
from openlm_moe.parallel import (
    fsdp1_clip_grad_norm_,
    fsdp1_expert_parallel,
    fsdp1_ignored_states,
    fsdp1_wrap_policy,
    gather_experts,
    make_layout,
    scatter_experts,
)

CONFIG = MoEConfig(num_experts=4, ffn_dim=24, balance_scope="sequence")
CPU = torch.device("cpu")


def wrap(model: toy.ToyLM, layout: Any, **options: Any) -> FSDP:
    fsdp1_expert_parallel(model, layout)
    return FSDP(
        model,
        auto_wrap_policy=fsdp1_wrap_policy(model),
        ignored_states=fsdp1_ignored_states(model),
        device_id=CPU,
        use_orig_params=True,
        **options,
    )


def backward(model: torch.nn.Module, tokens: torch.Tensor, share: float, micro: int) -> None:
    """Mean loss over this rank's tokens, as open_lm has it; FSDP1 averages over ranks."""
    for part in tokens.chunk(micro):
        with collect_losses(model, share=share / micro):
            logits = model(part[:, :-1])
            (F.cross_entropy(logits.flatten(0, 1).double(), part[:, 1:].flatten()) / micro).backward()


def compare(layout: Any, micro: int) -> dict[str, float]:
    reference, model = toy.build(CONFIG, pattern="dm"), wrap(toy.build(CONFIG, pattern="dm"), layout)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    worst = {"norm": 0.0, "weights": 0.0}
    for step in range(3):
        tokens = toy.batch(step, 4 * layout.world_size)
        backward(reference, tokens, 1.0, micro * layout.world_size)
        backward(model, tokens.chunk(layout.world_size)[layout.rank], 1.0, micro)
        norm = fsdp1_clip_grad_norm_(model, 0.5)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        same = toy.same_on_all_ranks(norm)
        worst["norm"] = max(worst["norm"], abs(norm.item() / wanted.item() - 1) if same else float("inf"))
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
        worst["weights"] = max(worst["weights"], toy.worst(full_state(model), toy.weights(reference)))
    return {name: toy.max_over_ranks(value) for name, value in worst.items()}


def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        found = {clean_name(name): value.detach().clone() for name, value in model.named_parameters()}
    return gather_experts(model, found)


def low_precision(layout: Any) -> dict[str, Any]:
    """Routers keep fp32 weights in computation under bf16 mixed precision."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = wrap(toy.build(CONFIG, torch.float32, "dm"), layout, mixed_precision=policy)
    seen = set()
    for _, layer in moe_layers(model):
        layer.router.register_forward_pre_hook(lambda m, args: seen.update(p.dtype for p in m.parameters()))
    backward(model, toy.batch(0, 2), 1.0, 1)
    return {"router": [str(dtype) for dtype in seen]}


def program(arguments: list[str]) -> dict[str, Any]:
    layout = make_layout(True, False, int(arguments[0]), CONFIG.num_experts, CPU)
    model = wrap(toy.build(CONFIG, torch.float32, "dm"), layout)
    units = sorted(clean_name(name) for name, module in model.named_modules() if isinstance(module, FSDP))
    state = full_state(model)
    again = gather_experts(model, scatter_experts(model, state))
    return {
        "units": units,
        "exact": {micro: compare(layout, micro) for micro in (1, 2)},
        "gathered": toy.worst(again, toy.weights(toy.build(CONFIG, torch.float32, "dm"))),
        **low_precision(layout),
    }


if __name__ == "__main__":
    toy.main(program)
