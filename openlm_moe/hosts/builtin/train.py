"""The training loop: steps, and what happens at their edges: logging, evaluation, checkpoints, stopping.

What the loop works on is a `Run`, which `assemble.py` puts together.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openlm_moe.data.evaluation import EvaluationSet
from openlm_moe.data.loader import TrainData
from openlm_moe.data.samples import Batch
from openlm_moe.hosts.builtin.architecture import Architecture
from openlm_moe.hosts.builtin.averaging import Averager
from openlm_moe.hosts.builtin.evaluate import Evaluation, evaluate
from openlm_moe.hosts.builtin.feed import Feed
from openlm_moe.hosts.builtin.plan import Plan
from openlm_moe.hosts.builtin.precision import LossScale, Precision
from openlm_moe.hosts.builtin.profiling import Profiler
from openlm_moe.hosts.builtin.saving import Saver
from openlm_moe.hosts.builtin.schedule import Schedule, set_lr
from openlm_moe.hosts.builtin.step import NonFinite, StepResult, StepRules, train_step
from openlm_moe.hosts.builtin.targets import Masking, make_example
from openlm_moe.parallel import Layout, StopRequest
from openlm_moe.parallel.ranks import gather
from openlm_moe.telemetry import metrics
from openlm_moe.telemetry.meters import StepMeter, expert_loads, perplexity
from openlm_moe.telemetry.sinks import Sinks

RECENT = 100  # steps over which the closing table's training loss is averaged


class TrainingFailed(Exception):
    """Training ended before its time, for a reason told in one line. The command exits with code 1."""


@dataclass
class Run:
    """Everything that a run consists of."""

    args: argparse.Namespace
    layout: Layout
    folder: Path
    architecture: Architecture
    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    scale: LossScale
    rules: StepRules
    masking: Masking
    averagers: list[Averager]
    data: TrainData
    validation: list[EvaluationSet]
    saver: Saver
    sinks: Sinks
    meter: StepMeter
    stop: StopRequest
    profiler: Profiler
    step: int = 0  # optimizer steps done
    logged_step: int = 0
    first_step: int = 0  # where this start began
    seconds: float = 0.0  # spent in steps since then
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    load: dict[str, Tensor] = field(default_factory=dict)  # tokens per expert since the last log line
    last_load: dict[int, list[int]] = field(default_factory=dict)  # layer id -> tokens per expert at the last log line
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Training tokens consumed over all ranks."""
        return self.plan.tokens(self.step)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks since this start, without evaluations and checkpoints."""
        return self.plan.tokens(self.step - self.first_step) / self.seconds if self.seconds else 0.0

    @property
    def done(self) -> bool:
        return self.step >= self.plan.total_steps


def train(run: Run) -> bool:
    """Trains `run` to its end or to a stop request, and saves it there. Returns whether it reached its end.

    Raises `TrainingFailed` when a loss or gradient is not finite, or when data end early or cannot be read.
    """
    feed = Feed(_batches(run), run.stop)
    dropped = 0.0
    while not run.done:
        set_lr(run.optimizer, run.schedule(run.step))
        with run.meter.phase(metrics.DATA_TIME):
            batch = feed.next()
            if batch is None:
                run.saver.save(run)
                raise TrainingFailed(
                    f"the data ended after step {run.step} of {run.plan.total_steps}; {run.saver.resume_hint(run)}"
                )
            mask = None if batch["mask"] is None else batch["mask"].to(run.layout.device, non_blocking=True)
            example = make_example(batch["tokens"].to(run.layout.device, non_blocking=True), mask, run.masking)
        try:
            result = train_step(
                run.model, run.optimizer, example, run.step, run.rules, run.precision, run.scale, run.meter
            )
        except NonFinite as error:
            raise TrainingFailed(_non_finite_message(run, batch, error)) from None
        run.step += 1
        for averager in run.averagers:
            averager.step()
        run.profiler.step()
        run.meter.step(run.plan.global_batch_size * run.plan.seq_len)
        run.recent.append(result.loss)
        dropped += result.dropped
        for name, counts in result.tokens_per_expert.items():
            run.load[name] = run.load[name] + counts if name in run.load else counts
        if run.step == 1 or run.step % run.args.log_every_n_steps == 0 or run.done:
            log_step(run, result, dropped)
            dropped = 0.0
        stopping = run.stop.agreed() and not run.done
        with run.meter.paused():
            at_edge(run, stopping)
        if stopping:
            failure = feed.failure()
            if failure is not None:
                run.saver.checkpoints.wait()
                raise TrainingFailed(f"after step {run.step}, which was saved: {failure}; {run.saver.resume_hint(run)}")
            return False
    return True


def _batches(run: Run) -> Iterator[Batch]:
    return run.data.batches(
        run.plan.global_batch_size,
        rank=run.layout.rank,
        world_size=run.layout.world_size,
        start_sample=run.step * run.plan.global_batch_size,
        num_batches=run.plan.total_steps - run.step,
        workers=run.args.workers,
        pin_memory=run.layout.device.type == "cuda",
    )


def at_edge(run: Run, stopping: bool) -> None:
    """Evaluates and saves where the step just done is the end of an epoch, of the run, or of a --save-every-n-steps."""
    epoch = run.plan.epoch_ending_at(run.step)
    args = run.args
    if run.validation and epoch is not None and (epoch % args.val_frequency == 0 or run.done):
        validate(run)
    every_n = args.save_every_n_steps > 0 and run.step % args.save_every_n_steps == 0
    due = epoch is not None and args.save_frequency > 0 and epoch % args.save_frequency == 0
    if stopping or run.done or every_n or due:
        run.saver.save(run)
    elif epoch is not None and args.save_most_recent:
        run.saver.save(run, transient=True)


def validate(run: Run) -> None:
    """Evaluates the weights, and each average of them, on every validation set; logs and keeps what comes out."""
    args, layout = run.args, run.layout
    how: dict[str, Any] = {
        "batch_size": val_batch_size(args, run.plan.global_batch_size, layout.world_size),
        "masking": run.masking,
        "precision": run.precision,
        "device": layout.device,
        "rank": layout.rank,
        "world_size": layout.world_size,
    }
    run.evaluations = evaluate(run.model, run.validation, **how)
    values = run.meter.progress(run.tokens)
    for evaluation in run.evaluations:
        values |= evaluation.metrics()
    for averager in run.averagers:
        with averager.in_place():
            for evaluation in evaluate(run.model, run.validation, **how):
                values |= evaluation.metrics(f"@{averager.name}")
    run.sinks.log(values, run.step, run.tokens)


def val_batch_size(args: argparse.Namespace, global_batch_size: int, world_size: int) -> int:
    """Samples of one evaluation step on one rank; as many as a micro-batch unless --global-val-batch-size says."""
    return max((args.global_val_batch_size or global_batch_size // args.accum_freq) // world_size, 1)


def log_step(run: Run, result: StepResult, dropped: float) -> None:
    """Logs the last step's losses, and throughput and expert load since the last call."""
    layer_ids = run.architecture.layer_ids(run.model)
    run.last_load = {layer_ids[name]: counts.tolist() for name, counts in run.load.items()}
    routed = sum(sum(counts) for counts in run.last_load.values())
    run.load = {}
    timing = run.meter.collect(run.tokens)
    run.seconds += timing[metrics.BATCH_TIME] * (run.step - run.logged_step)
    run.logged_step = run.step
    values: dict[str, Any] = {
        metrics.LOSS: result.loss,
        metrics.PERPLEXITY: perplexity(result.loss),
        metrics.LR: run.schedule(run.step - 1),
        metrics.GRAD_NORM: result.grad_norm,
        **timing,
    }
    if run.last_load:
        values[metrics.LOAD_BALANCING_LOSS] = result.load_balancing_loss
        values[metrics.ROUTER_Z_LOSS] = result.router_z_loss
        values[metrics.DROPPED_FRACTION] = dropped / max(routed, 1)
        values |= expert_loads(run.last_load)
    if run.rules.z_loss_coefficient:
        values["train/z_loss"] = result.z_loss
    if run.rules.log_logit_mean:
        values["train/logit_mean"] = result.logit_mean
    if run.scale.enabled:
        values["train/loss_scale"] = run.scale.scale
    run.sinks.log(values, run.step, run.tokens)


def _non_finite_message(run: Run, batch: Batch, error: NonFinite) -> str:
    """What is known of a step that went wrong: its number, the samples, and where to go on from. All ranks call it."""
    suspects = gather(batch["provenance"] if error.mine else None)
    shards = list(dict.fromkeys(shard for part in suspects for shard in part or ()))
    if not shards:  # the loss is finite everywhere: only the gradient is not
        shards = list(dict.fromkeys(shard for part in gather(batch["provenance"]) for shard in part))
    named = "; ".join(shards[:4]) + (f"; and {len(shards) - 4} more" if len(shards) > 4 else "")
    good = run.saver.latest()
    back = "there is no checkpoint yet" if good is None else f"the last good checkpoint is {good}"
    return f"the {error.what} of step {run.step + 1} is not finite (samples: {named}); nothing was saved since: {back}"


def mean_recent_loss(run: Run) -> float:
    """Training cross-entropy over the last `RECENT` steps; NaN if there was none."""
    return sum(run.recent) / len(run.recent) if run.recent else math.nan
