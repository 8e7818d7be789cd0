"""Several ranks against one process on the joined batch. Arguments: expert-parallel, fsdp|replicate|hybrid."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import toy

from openlm_moe import MoEConfig
from openlm_moe.parallel import make_layout, parallelize

SEQUENCES, STEPS = 16, 3


def compare(
    config: MoEConfig, layout: Any, dtype: torch.dtype, accumulation: int, kind: str, reentrant: bool, pattern: str
) -> dict[str, float]:
    """Largest relative differences over STEPS steps of SGD."""
    reference = toy.build(config, dtype, pattern)
    model = parallelize(toy.build(config, dtype, pattern), layout)
    model.set_checkpointing(kind, reentrant)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    rank, world = layout.rank, layout.world_size
    found = dict.fromkeys(("loss", "grad", "input", "norm", "weights"), 0.0)
    for step in range(STEPS):
        tokens = toy.batch(step, SEQUENCES)
        total = tokens[:, 1:].numel()
        wanted_loss, wanted_inputs = toy.train_step(reference, tokens, total)
        mine = toy.share_of_rank(tokens, rank, world)
        loss, inputs = toy.train_step(model, mine, total, accumulation, lazy=kind == "block")
        before = sum(toy.share_of_rank(tokens, r, world).shape[0] for r in range(rank)) * toy.LENGTH
        wanted_inputs = [grad[before : before + mine.shape[0] * toy.LENGTH] for grad in wanted_inputs]
        norm, wanted_norm = toy.norm_of(model), toy.norm_of(reference)
        differences = {
            "loss": abs(toy.sum_over_ranks(loss).item() / wanted_loss.item() - 1),
            "grad": toy.worst(toy.gradients(model), toy.gradients(reference)),
            "input": toy.worst(inputs, wanted_inputs),
            "norm": abs(norm.item() / wanted_norm.item() - 1) if toy.same_on_all_ranks(norm) else float("inf"),
        }
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
        differences["weights"] = toy.worst(toy.weights(model), toy.weights(reference))
        found = {key: max(value, differences[key]) for key, value in found.items()}
    return {key: toy.max_over_ranks(value) for key, value in found.items()}


QUICK = [(0.1, 1, "off", False), (0.1, 4, "block", False), (0.0, 2, "experts", False)]
KINDS = [("off", False), ("block", False), ("block", True), ("experts", False), ("experts", True)]


def program(arguments: list[str]) -> dict[str, Any]:
    ep, sharding, amount = arguments
    if sharding == "hybrid":  # as if on two nodes
        os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // 2)
    layout = make_layout(sharding != "replicate", sharding == "hybrid", ep, 8, torch.device("cpu"))
    found: dict[str, Any] = {"ep": layout.expert_parallel}
    pattern = "dm" if amount == "quick" else "dmmd"
    cases = QUICK if amount == "quick" else [(w, n, *kind) for w in (0.1, 0.0) for n in (1, 4) for kind in KINDS]
    plain = MoEConfig(num_experts=8, ffn_dim=24, balance_scope="sequence")
    for weight, accumulation, kind, reentrant in cases:
        config = replace(plain, loss_weight=weight, z_loss_weight=weight)
        name = f"weight {weight}, accumulation {accumulation}, {kind}{' reentrant' if reentrant else ''}"
        found[name] = compare(config, layout, torch.float64, accumulation, kind, reentrant, pattern)
    gated = replace(plain, ffn="swiglu", shared_experts=1, normalize_weights=True)
    found["swiglu, shared expert"] = compare(gated, layout, torch.float64, 1, "block", True, pattern)
    found["fp32"] = compare(plain, layout, torch.float32, 1, "off", False, pattern)
    return found


if __name__ == "__main__":
    toy.main(program)
