"""check_plan on good and bad plans, and the order of collectives. Two or four ranks, expert parallel 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from openlm_moe import MoEConfig, build_moe, moe_layers
from openlm_moe.parallel import (
    PlanError,
    apply_expert_parallel,
    apply_fsdp,
    check_plan,
    make_layout,
    parallelize,
)
from openlm_moe.parallel.mesh import Layout
from openlm_moe.parallel.record import Collective, record_collectives

CONFIG = MoEConfig(num_experts=4, ffn_dim=24, jitter=0.1)


def model_with_experts_split(layout: Layout) -> toy.ToyLM:
    return apply_expert_parallel(toy.build(CONFIG, torch.float32), layout)


def shard_parts(model: toy.ToyLM, layout: Layout, skip: tuple[nn.Module, ...] = ()) -> None:
    """The right units by hand, root included, but for `skip`."""
    for block in model.blocks:
        if moe_layers(block):
            fully_shard([block.norm1, block.mixer, block.norm2], mesh=layout.dense_mesh)
            if block.ffn.router not in skip:
                fully_shard(block.ffn.router, mesh=layout.dense_mesh)
            fully_shard(block.ffn.experts, mesh=layout.expert_mesh)
        else:
            fully_shard(block, mesh=layout.dense_mesh)
    for module in (model.embed, model.norm, model.head):
        if module not in skip:
            fully_shard(module, mesh=layout.dense_mesh)


def right(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    shard_parts(model, layout)
    return fully_shard(model, mesh=layout.dense_mesh)


def block_as_unit(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    for block in model.blocks:
        if moe_layers(block):
            fully_shard(block.ffn.experts, mesh=layout.expert_mesh)
        fully_shard(block, mesh=layout.dense_mesh)
    for module in (model.embed, model.norm, model.head):
        fully_shard(module, mesh=layout.dense_mesh)
    return fully_shard(model, mesh=layout.dense_mesh)


def root_with_parameters(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    shard_parts(model, layout, skip=(model.head,))
    return fully_shard(model, mesh=layout.dense_mesh)


def list_spans(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    shard_parts(model, layout, skip=(model.embed, model.head))
    fully_shard([model.embed, model.head], mesh=layout.dense_mesh)
    return fully_shard(model, mesh=layout.dense_mesh)


def plain_shards(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    for _, layer in moe_layers(model):
        for name in ("w1", "w2"):
            setattr(layer.experts, name, nn.Parameter(getattr(layer.experts, name).to_local().detach().clone()))
    return apply_fsdp(model, layout)


def replicated_experts(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    for _, layer in moe_layers(model):
        for name in ("w1", "w2"):
            whole = getattr(layer.experts, name).full_tensor().detach()
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(whole, layout.ep_mesh, [Replicate()])))
    return apply_fsdp(model, layout)


def unwrapped_head(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    shard_parts(model, layout, skip=(model.head,))
    return fully_shard(model, mesh=layout.dense_mesh, ignored_params=set(model.head.parameters()))


def two_units(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    model.head.weight = model.embed.weight
    shard_parts(model, layout)
    return fully_shard(model, mesh=layout.dense_mesh)


def low_router(layout: Layout) -> nn.Module:
    model = model_with_experts_split(layout)
    for _, layer in moe_layers(model):
        fully_shard(layer.router, mesh=layout.dense_mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shard_parts(model, layout, skip=tuple(layer.router for _, layer in moe_layers(model)))
    return fully_shard(model, mesh=layout.dense_mesh)


def verdict(make: Callable[[Layout], nn.Module], layout: Layout) -> str:
    try:
        check_plan(make(layout))
    except PlanError as error:
        return str(error)
    return "accepted"


def leaves_no_trace(layout: Layout) -> dict[str, bool]:
    model = right(layout)
    model.eval()
    state = torch.get_rng_state()
    check_plan(model)
    return {
        "no gradient": all(p.grad is None for p in model.parameters()),
        "random state": torch.equal(state, torch.get_rng_state()),
        "mode": not any(module.training for module in model.modules()),
    }


def order(layout: Layout, kind: str) -> list[str]:
    """The second step's collectives in words; experts' all-gathers are told by their size."""
    model = parallelize(toy.build(CONFIG, torch.float32), layout)
    model.set_checkpointing(kind)
    tokens = toy.share_of_rank(toy.batch(0, 8), layout.rank, layout.world_size)
    toy.train_step(model, tokens, 64)
    model.zero_grad()
    with record_collectives() as found:
        toy.train_step(model, tokens, 64)
    return [word(collective, layout) for collective in found]


class MoELast(nn.Module):
    """Nothing follows the layer whose backward could bring its experts' all-gather along."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe = nn.Embedding(toy.VOCAB, toy.DIM), build_moe(toy.DIM, 0, CONFIG)
        self.moe.init_weights(0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.moe(self.embed(tokens))


def order_of_last(layout: Layout) -> list[str]:
    model = parallelize(MoELast(), layout)
    tokens = toy.batch(layout.rank, 2)
    model(tokens).square().sum().backward()
    with record_collectives() as found:
        model(tokens).square().sum().backward()
    return [word(collective, layout) for collective in found]


def word(collective: Collective, layout: Layout) -> str:
    expert_numel = 2 * CONFIG.num_experts // layout.expert_parallel * toy.DIM * CONFIG.ffn_dim
    what = {"all-gather": "gather", "reduce-scatter": "scatter", "all-to-all": "exchange"}[collective.kind]
    if collective.kind == "all-gather" and collective.output_numel == expert_numel:
        what = "gather experts"
    if collective.kind == "all-to-all" and collective.output_numel == CONFIG.num_experts:
        what = "exchange counts"
    return f"{what}{' (backward)' if collective.in_backward else ''}"


def same_everywhere(words: list[str]) -> bool:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, words)
    return all(other == words for other in everywhere)


class PostNorm(nn.Module):
    """A block whose second norm is applied to the MoE layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.moe = nn.RMSNorm(toy.DIM), nn.RMSNorm(toy.DIM), build_moe(toy.DIM, 0, CONFIG)
        self.moe.init_weights(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm2(self.moe(self.norm1(x)))


def post_norm(layout: Layout, group_parts: bool) -> str:
    model = nn.Sequential(nn.Embedding(toy.VOCAB, toy.DIM), PostNorm())
    return verdict(lambda layout: parallelize(model, layout, blocks=[model[1]], group_parts=group_parts), layout)


def tied(layout: Layout) -> str:
    """Tied embeddings leave the root with one parameter, which is allowed."""
    model = toy.build(CONFIG, torch.float32)
    model.head.weight = model.embed.weight
    return verdict(lambda layout: parallelize(model, layout), layout)


def program(arguments: list[str]) -> dict[str, Any]:
    layout = make_layout(True, False, 2, CONFIG.num_experts, torch.device("cpu"))
    if arguments == ["order"]:
        words = {kind: order(layout, kind) for kind in ("off", "block", "experts")}
        words["last"] = order_of_last(layout)
        return {"words": words, "same": all(same_everywhere(found) for found in words.values())}
    bad = (
        block_as_unit,
        root_with_parameters,
        list_spans,
        plain_shards,
        replicated_experts,
        unwrapped_head,
        two_units,
        low_router,
    )
    found: dict[str, Any] = {make.__name__: verdict(make, layout) for make in (right, *bad)}
    found["apply_fsdp"] = verdict(lambda layout: parallelize(toy.build(CONFIG, torch.float32), layout), layout)
    found["amp"] = verdict(
        lambda layout: parallelize(toy.build(CONFIG, torch.float32), layout, precision="amp"), layout
    )
    found["tied"] = tied(layout)
    found["post norm"] = post_norm(layout, group_parts=False)
    found["post norm, grouped"] = post_norm(layout, group_parts=True)
    found["trace"] = leaves_no_trace(layout)
    return found


if __name__ == "__main__":
    toy.main(program)
