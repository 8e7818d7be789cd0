"""What must not hang, leak or differ: skewed and random routing, poisoned buffers, odd numbers, a NaN. Two ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import toy
from torch import Tensor, nn

from openlm_moe import MoEConfig, build_moe, collect_losses, moe_layers
from openlm_moe.layers import router as router_module
from openlm_moe.parallel import apply_expert_parallel, check_plan, clip_grad_norm_, make_layout, parallelize
from openlm_moe.parallel.mesh import Layout

CONFIG = MoEConfig(num_experts=4, ffn_dim=24, balance_scope="sequence")
CPU = torch.device("cpu")


def layout_of(ep: str | int = 2, num_experts: int = 4, fsdp: bool = True) -> Layout:
    return make_layout(fsdp, False, ep, num_experts, CPU)


def choose(select: Callable[[Tensor], Tensor]) -> Any:
    """Routes by `select(scores (T, E)) -> ids (T, K)`."""
    return mock.patch.object(router_module, "select_experts", lambda scores, config, bias: select(scores))


def one_step(model: nn.Module, layout: Layout, sequences: int = 6, step: int = 0) -> Tensor:
    tokens = toy.batch(step, sequences)
    mine = toy.share_of_rank(tokens, layout.rank, layout.world_size)
    loss, _ = toy.train_step(model, mine, tokens[:, 1:].numel())
    return toy.sum_over_ranks(loss)


def skewed(layout: Layout) -> dict[str, float]:
    """Rank 0 sends all to expert 0, rank 1 all to the last: three steps, against one process routed the same way."""
    model, reference = parallelize(toy.build(CONFIG, pattern="dm"), layout), toy.build(CONFIG, pattern="dm")
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    worst = 0.0
    for step in range(3):
        of_rank_0 = toy.share_of_rank(toy.batch(step, 6), 0, 2).shape[0] * toy.LENGTH

        def rows(scores: Tensor, first: int) -> Tensor:
            ids = torch.full((scores.shape[0], 1), 3)
            ids[:first] = 0
            return ids

        with choose(lambda scores, n=of_rank_0: rows(scores, n if layout.rank == 0 else 0)):
            one_step(model, layout, step=step)
        with choose(lambda scores, n=of_rank_0: rows(scores, n)):
            toy.train_step(reference, toy.batch(step, 6), 6 * toy.LENGTH)
        grads = toy.gradients(model)
        worst = max(worst, toy.worst(grads, toy.gradients(reference)))
        empty = max(grads[f"blocks.1.ffn.experts.{w}"][1:3].abs().max().item() for w in ("w1", "w2"))
        missing = sum(p.grad is None for p in model.parameters())
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    return {"worst": toy.max_over_ranks(worst), "empty experts": empty, "missing": missing}


def one_holds_all(layout: Layout) -> dict[str, float]:
    """Every token goes to experts of rank 0, so that rank 1 receives nothing: against one process routed so."""
    model, reference = parallelize(toy.build(CONFIG, pattern="dm"), layout), toy.build(CONFIG, pattern="dm")
    with choose(lambda scores: torch.tensor([[0, 1]]).expand(scores.shape[0], 2)):
        one_step(model, layout)
        toy.train_step(reference, toy.batch(0, 6), 6 * toy.LENGTH)
    return {"worst": toy.max_over_ranks(toy.worst(toy.gradients(model), toy.gradients(reference)))}


def alone(config: MoEConfig, layout: Layout) -> float:
    """A layer with padding tokens: output and gradients of expert parallel against the local layer, on this rank."""
    torch.manual_seed(0)
    local = build_moe(toy.DIM, 0, config).double()
    local.init_weights(3)
    spread = nn.ModuleList([build_moe(toy.DIM, 0, config).double()])
    spread.load_state_dict({f"0.{name}": value for name, value in local.state_dict().items()})
    apply_expert_parallel(spread, layout)
    torch.manual_seed(1 + layout.rank)
    x, mask = torch.randn(2, 2, 9, toy.DIM, dtype=torch.float64), torch.rand(2, 9) > 0.3
    found = []
    for layer, part in ((spread[0], x[0]), (local, x[0].clone())):
        part = part.clone().requires_grad_()
        out = layer(part, mask)
        out.square().sum().backward()
        found.append([out.detach(), part.grad, layer.router.weight.grad])
    assert found[0][0][~mask].abs().max() == 0
    return toy.max_over_ranks(toy.worst(found[0], found[1]))


def random_routing(layout: Layout, steps: int) -> bool:
    """Ranks are late by random times, and route at random. True when every step came to its end."""
    model = parallelize(toy.build(CONFIG, torch.float32, "dm"), layout)
    late, seed = random.Random(layout.rank), torch.Generator().manual_seed(layout.rank)
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: time.sleep(late.random() * 0.001))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        lean = torch.rand(4, generator=seed) * torch.randint(0, 4, (1,), generator=seed)
        with choose(lambda scores, lean=lean: (torch.rand(scores.shape, generator=seed) + lean).topk(2).indices):
            one_step(model, layout, step=step)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return True


def poisoned(layout: Layout) -> dict[str, bool]:
    """Every fresh buffer holds NaN before it is written: results and gradients are as without, over two steps."""

    def two_steps() -> tuple[list[float], dict[str, Tensor]]:
        model = parallelize(toy.build(CONFIG, pattern="dm"), layout)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            losses.append(one_step(model, layout, step=step).item())
            grads = toy.gradients(model)
            sgd.step()
            sgd.zero_grad()
        return losses, grads

    losses, grads = two_steps()
    torch.use_deterministic_algorithms(True)  # fills torch.empty and its kin with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        filled = bool(torch.empty(3).isnan().all() and torch.ones(1).new_empty(3).isnan().all())
        poisoned_losses, poisoned_grads = two_steps()
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(grads[name], poisoned_grads[name]) for name in grads)
    return {"poison works": filled, "losses": losses == poisoned_losses, "gradients": same}


def one_rank_nan(layout: Layout) -> dict[str, bool]:
    """A NaN on rank 1 alone: all ranks see a norm that is not finite, and gradients stay as they are."""
    model = parallelize(toy.build(CONFIG, torch.float32, "dm"), layout)
    one_step(model, layout)
    before = toy.gradients(model)
    if layout.rank == 1:
        with torch.no_grad():
            model.blocks[1].ffn.experts.w1.grad.to_local().view(-1)[0] = float("nan")
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    seen: list[Any] = [None, None]
    dist.all_gather_object(seen, bool(torch.isfinite(norm)))
    head = "head.weight"
    return {"none steps": seen == [False, False], "unscaled": torch.equal(before[head], toy.gradients(model)[head])}


def clipping(layout: Layout) -> float:
    """Clipped gradients against torch's own clipping in one process."""
    model, reference = parallelize(toy.build(CONFIG, pattern="dm"), layout), toy.build(CONFIG, pattern="dm")
    one_step(model, layout)
    toy.train_step(reference, toy.batch(0, 6), 6 * toy.LENGTH)
    clip_grad_norm_(model.parameters(), 0.01)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    return toy.max_over_ranks(toy.worst(toy.gradients(model), toy.gradients(reference)))


def odd_experts(experts: int) -> dict[str, Any]:
    """Without expert parallelism; experts that do not divide shard on a later dimension."""
    layout = layout_of("off", experts)
    config = replace(CONFIG, num_experts=experts, top_k=min(2, experts))
    model, reference = parallelize(toy.build(config, pattern="dm"), layout), toy.build(config, pattern="dm")
    one_step(model, layout)
    toy.train_step(reference, toy.batch(0, 6), 6 * toy.LENGTH)
    weight = dict(model.named_parameters())["blocks.1.ffn.experts.w1"]
    worst = toy.max_over_ranks(toy.worst(toy.gradients(model), toy.gradients(reference)))
    return {"worst": worst, "dim": weight.placements[-1].dim, "held": weight.to_local().numel() / weight.numel()}


def wrong_factor(layout: Layout) -> float:
    """The same comparison with FSDP's own averaging of expert gradients: it has to show."""
    model, reference = parallelize(toy.build(CONFIG, pattern="dm"), layout), toy.build(CONFIG, pattern="dm")
    for _, layer in moe_layers(model):
        layer.experts.set_gradient_divide_factor(2.0)
    one_step(model, layout)
    toy.train_step(reference, toy.batch(0, 6), 6 * toy.LENGTH)
    return toy.worst(toy.gradients(model), toy.gradients(reference))


def every_parameter_trains(layout: Layout, **options: Any) -> dict[str, Any]:
    """One AdamW step: every parameter moves, is in one group, stays fp32, and starts from step 0."""
    model = parallelize(toy.build(CONFIG, torch.float32, "dm"), layout, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    before = toy.weights(model)
    seen = []
    for _, layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda module, args: seen.append(str(args[1].dtype)))
    loss = one_step(model, layout)
    optimizer.step()
    after = toy.weights(model)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return {
        "still": [name for name in before if torch.equal(before[name], after[name])],
        "groups": sorted(held) == sorted(id(p) for p in model.parameters()),
        "fp32": all(p.dtype == torch.float32 for p in model.parameters()),
        "steps": {int(state["step"]) for state in optimizer.state.values()} == {1},
        "combine weights": set(seen) == {"torch.float32"},
        "loss": loss.item(),
    }


def task_gradient_of_router(layout: Layout) -> float:
    """Without auxiliary losses the router learns from the task alone."""
    model = parallelize(toy.build(replace(CONFIG, loss_weight=0.0, balance="none"), pattern="dm"), layout)
    one_step(model, layout)
    return toy.gradients(model)["blocks.1.ffn.router.weight"].abs().max().item()


def global_scope(layout: Layout) -> float:
    """Balance scope `global` on two ranks is that of the joined batch in one process."""
    config = replace(CONFIG, balance_scope="global", loss_weight=1.0)
    model, reference = parallelize(toy.build(config, pattern="dm"), layout), toy.build(config, pattern="dm")

    def reduced(name: str, counts: Tensor) -> Tensor:
        return toy.sum_over_ranks(counts)

    total = 6 * toy.LENGTH
    mine = toy.share_of_rank(toy.batch(0, 6), layout.rank, 2)
    for m, tokens, reduce in ((model, mine, reduced), (reference, toy.batch(0, 6), None)):
        with collect_losses(m, share=tokens[:, 1:].numel() / total, reduce_counts=reduce) as collector:
            logits = m(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").div(
                total
            ).backward()
        m.balance = collector.load_balancing_loss.double() * (tokens.shape[0] / 6)
    loss_difference = abs(toy.sum_over_ranks(model.balance) - reference.balance).item()
    return max(loss_difference, toy.max_over_ranks(toy.worst(toy.gradients(model), toy.gradients(reference))))


def empty_evaluation(layout: Layout) -> dict[str, Any]:
    """A rank with no sequences takes part in evaluation, and training goes on from unchanged, current weights."""
    model = parallelize(toy.build(CONFIG, pattern="dm"), layout)
    reference = toy.build(CONFIG, pattern="dm")
    tokens = toy.batch(0, 4)[:, :-1]
    held = [*model.parameters(), *reference.parameters()]  # as an optimizer holds them
    with torch.no_grad():
        logits = model(tokens if layout.rank == 0 else tokens[:0])
        worst = toy.worst([logits], [reference(tokens if layout.rank == 0 else tokens[:0])])
    with torch.no_grad():  # weights change after an evaluation: nothing gathered may go stale
        for parameter in held:
            parameter.mul_(0.5)
    one_step(model, layout)
    toy.train_step(reference, toy.batch(0, 6), 6 * toy.LENGTH)
    after = toy.worst(toy.gradients(model), toy.gradients(reference))
    return {"evaluation": toy.max_over_ranks(worst), "after": toy.max_over_ranks(after)}


def frozen(layout: Layout) -> bool:
    """A frozen router and frozen experts of one layer take part without gradients."""
    base = toy.build(CONFIG, torch.float32, "mm")
    base.blocks[0].ffn.router.requires_grad_(False)
    base.blocks[1].ffn.experts.requires_grad_(False)
    model = parallelize(base, layout)
    one_step(model, layout)
    one_step(model, layout)
    return model.blocks[1].ffn.experts.w1.grad is None and model.blocks[0].ffn.experts.w1.grad is not None


def program(arguments: list[str]) -> dict[str, Any]:
    layout = layout_of()
    if arguments[0] == "random":
        return {"came to its end": random_routing(layout_of(int(arguments[1])), int(arguments[2]))}
    replicated = layout_of(fsdp=False)
    check_plan(parallelize(toy.build(CONFIG, torch.float32, "dm"), replicated))
    return {
        "skewed": skewed(layout),
        "one holds all": one_holds_all(layout),
        "padding": alone(CONFIG, layout),
        "capacity": alone(replace(CONFIG, moe_type="capacity", capacity_factor=0.7), layout),
        "poisoned": poisoned(layout),
        "nan": one_rank_nan(layout),
        "clipping": clipping(layout),
        "odd": {experts: odd_experts(experts) for experts in (3, 1)},
        "wrong factor": wrong_factor(layout),
        "trains": {
            "fp32": every_parameter_trains(layout),
            "amp": every_parameter_trains(layout, precision="amp"),
            "pure_bf16": every_parameter_trains(layout, precision="pure_bf16"),
            "offload": every_parameter_trains(layout, cpu_offload=True),
            "gathered": every_parameter_trains(layout, reshard_after_forward=False),
            "replicated": every_parameter_trains(replicated),
        },
        "router": task_gradient_of_router(layout),
        "global": global_scope(layout),
        "evaluation": empty_evaluation(layout),
        "frozen": frozen(layout),
    }


if __name__ == "__main__":
    toy.main(program)
