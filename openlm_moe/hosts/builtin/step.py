"""One optimizer step: forward and backward of every micro-batch, global norm, clipping, AdamW, balancing biases.

Each rank's loss is the sum of its token losses over the step's token count of all ranks, and gradients are summed over
ranks. So a token weighs the same wherever it is computed, and neither --accum-freq nor the number of ranks changes a
gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openlm_moe import LossCollector, MoEConfig, collect_losses, update_expert_biases
from openlm_moe.hosts.builtin.lm_loss import summed_loss
from openlm_moe.hosts.builtin.precision import LossScale, Precision
from openlm_moe.hosts.builtin.targets import Example, count_targets
from openlm_moe.parallel import clip_grad_norm_, gradient_sync
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.meters import StepMeter


@dataclass(frozen=True)
class StepRules:
    """What a step is made of. `counts_vary`: whether targets may be masked, so that each step has to count them."""

    moe: MoEConfig
    accum_freq: int
    grad_clip_norm: float | None
    z_loss_coefficient: float
    seed: int
    rank: int
    world_size: int
    counts_vary: bool
    log_logit_mean: bool = False
    collect: Callable[..., AbstractContextManager[LossCollector]] = collect_losses  # for this kind of model


@dataclass
class StepResult:
    """What a step measured, over all ranks. `skipped`: fp16 gradients overflowed, so no weight changed."""

    loss: float  # cross-entropy per token
    load_balancing_loss: float
    router_z_loss: float
    z_loss: float
    logit_mean: float
    grad_norm: float
    targets: int
    tokens_per_expert: dict[str, Tensor]  # layer name -> (E,) int64
    dropped: float
    skipped: bool = False


class NonFinite(Exception):
    """The step's loss or gradient is not finite. Raised on all ranks together, before any weight changed.

    `mine`: whether this rank's own loss is the cause.
    """

    def __init__(self, what: str, mine: bool) -> None:
        super().__init__(what)
        self.what, self.mine = what, mine


@dataclass
class _Sums:
    """Sums over micro-batches; tensors stay on the device until the step's one transfer."""

    scalars: Tensor  # (5,): cross-entropy, balancing loss, router z-loss, head z-loss, mean logit
    per_layer: dict[str, Tensor] = field(default_factory=dict)  # name -> (E + 1,): tokens per expert, then dropped

    def add(self, scalars: list[Tensor | float], collector: LossCollector) -> None:
        self.scalars += torch.stack([torch.as_tensor(s).to(self.scalars) for s in scalars])
        for name, stats in collector.per_layer.items():
            row = torch.cat([stats.tokens_per_expert_E, stats.dropped.reshape(1)])
            self.per_layer[name] = self.per_layer[name] + row if name in self.per_layer else row

    def reduce(self) -> None:
        """Sums over ranks."""
        if not _distributed():
            return
        dist.all_reduce(self.scalars)
        if self.per_layer:
            rows = torch.stack(list(self.per_layer.values()))
            dist.all_reduce(rows)
            self.per_layer = dict(zip(self.per_layer, rows, strict=True))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Example,
    step: int,
    rules: StepRules,
    precision: Precision,
    scale: LossScale,
    meter: StepMeter,
) -> StepResult:
    """Trains on `example`, this rank's part of the batch of `step`. Every rank calls it. Raises `NonFinite`."""
    parameters = list(model.parameters())
    device = example.inputs.device
    targets = global_count(example, rules)
    parts = example.split(rules.accum_freq)
    optimizer.zero_grad(set_to_none=True)
    sums = _Sums(torch.zeros(5, dtype=torch.float64, device=device))
    reduce_counts = _count_reduction(model, parts, step, rules, precision)

    for number, part in enumerate(parts):
        seed_everything(rules.seed, step, number, rules.rank)
        share = _valid(part, rules) / targets
        with (
            gradient_sync(model, last=number == len(parts) - 1),
            rules.collect(model, share=share, scale=scale.scale, reduce_counts=reduce_counts) as collector,
        ):
            with meter.phase(metrics.FORWARD_TIME), precision.autocast():
                logits = model(part.inputs, part.mask)
                summed = summed_loss(logits, part.targets, rules.z_loss_coefficient > 0)
                head_z = 0.0 if summed.z is None else rules.z_loss_coefficient * summed.z / targets
                loss = summed.cross_entropy / targets + head_z
            logit_mean = logits.detach().mean() if rules.log_logit_mean else 0.0
            del logits
            with meter.phase(metrics.BACKWARD_TIME):
                (loss * scale.scale).backward()
        sums.add(
            [
                summed.cross_entropy.detach() / targets,
                share * collector.load_balancing_loss,
                share * collector.z_loss,
                head_z.detach() if isinstance(head_z, Tensor) else 0.0,
                share * logit_mean,
            ],
            collector,
        )

    mine_finite = torch.isfinite(sums.scalars[0])
    with meter.phase(metrics.SYNC_TIME):
        sums.reduce()
    with meter.phase(metrics.OPTIM_STEP_TIME):
        scale.unscale_(parameters)
        norm = float(clip_grad_norm_(parameters, rules.grad_clip_norm))
        loss_value, balancing, router_z, head_z_value, logit_mean = sums.scalars.tolist()
        skipped = not math.isfinite(norm) and scale.may_skip()
        if not math.isfinite(loss_value) or (not math.isfinite(norm) and not skipped):
            raise NonFinite("loss" if not math.isfinite(loss_value) else "gradient", not mine_finite)
        if not skipped:
            optimizer.step()
            if rules.moe.balance == "bias":
                update_expert_biases(model, {name: row[:-1] for name, row in sums.per_layer.items()})
        scale.update(finite=not skipped)

    counts = {name: row[:-1] for name, row in sums.per_layer.items()}
    dropped = float(sum(row[-1] for row in sums.per_layer.values()))
    return StepResult(
        loss_value, balancing, router_z, head_z_value, logit_mean, norm, targets, counts, dropped, skipped
    )


def global_count(example: Example, rules: StepRules) -> int:
    """Targets with a loss in the whole step. At least 1, so that a step without any is a step without gradient."""
    if not rules.counts_vary:
        return example.targets.numel() * rules.world_size
    count = torch.tensor(count_targets(example), device=example.targets.device)
    if _distributed():
        dist.all_reduce(count)
    return max(int(count), 1)


def _valid(part: Example, rules: StepRules) -> int:
    return count_targets(part) if rules.counts_vary else part.targets.numel()


def _count_reduction(
    model: nn.Module, parts: list[Example], step: int, rules: StepRules, precision: Precision
) -> Callable[[str, Tensor], Tensor] | None:
    """How --moe-balance-scope global learns each expert's count over all micro-batches and ranks.

    One micro-batch: the ranks' counts are added while it runs. Several: a first pass without gradient, from the same
    random state and so with the same routing, counts them all before.
    """
    moe = rules.moe
    if moe.num_experts == 0 or moe.balance_scope != "global" or moe.balance != "loss" or moe.loss_weight == 0:
        return None
    if len(parts) == 1:
        return _all_reduced if _distributed() else None
    sums = _Sums(torch.zeros(1, device=parts[0].inputs.device))
    for number, part in enumerate(parts):
        seed_everything(rules.seed, step, number, rules.rank)
        with torch.no_grad(), rules.collect(model) as collector, precision.autocast():
            model(part.inputs, part.mask)
        sums.add([0.0], collector)
    sums.reduce()
    return lambda name, counts_E: sums.per_layer[name][:-1]


def _all_reduced(name: str, counts_E: Tensor) -> Tensor:
    counts_E = counts_E.clone()
    dist.all_reduce(counts_E)
    return counts_E


def seed_everything(seed: int, *place: int) -> None:
    """Sets torch's generators from `seed` and a place in the run, so that a resumed run needs no saved random state."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
