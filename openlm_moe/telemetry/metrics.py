"""The names of all metrics, with unit and meaning: what sinks write, report, watch and dashboard read, and docs print.

open_lm's names stand where it has one; its "samples" are tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP = "step"
TOKENS = "tokens"
WALL_TIME = "wall_time"

LOSS = "train/loss"
PERPLEXITY = "train/perplexity"
LOAD_BALANCING_LOSS = "train/load_balancing_loss"
ROUTER_Z_LOSS = "train/router_z_loss"
LR = "train/lr"
GRAD_NORM = "train/grad_norm"
TRAIN_TOKENS = "train/tokens"
ACTIVE_FLOPS = "train/active_flops"
TOKENS_PER_SECOND = "train/samples_per_second"
TOKENS_PER_SECOND_PER_GPU = "train/samples_per_second_per_gpu"
MFU = "train/mfu"
PEAK_MEMORY = "train/peak_memory"
DATA_TIME = "train/data_time"
FORWARD_TIME = "train/forward_time"
BACKWARD_TIME = "train/backward_time"
OPTIM_STEP_TIME = "train/optim_step_time"
SYNC_TIME = "train/sync_time"
BATCH_TIME = "train/batch_time"
DROPPED_FRACTION = "train/dropped_fraction"
MAX_VIOLATION = "experts/max_violation"

LAYER_METRICS = ("max_over_mean", "min_over_mean", "std_over_mean", "max_violation", "entropy", "load")
VALID_METRICS = ("loss", "perplexity")

_LAYER = re.compile(r"experts/layer_(\d+)/(\w+)")
_VALID = re.compile(r"valid/(.+)/(\w+)")


def layer_metric(layer_id: int, what: str) -> str:
    """Name of one layer's expert metric; `what` is one of LAYER_METRICS."""
    if what not in LAYER_METRICS:
        raise ValueError(f"{what!r} is no expert metric; known are {', '.join(LAYER_METRICS)}")
    return f"experts/layer_{layer_id}/{what}"


def valid_metric(name: str, what: str) -> str:
    """Name of a metric of the validation set `name`; `what` is one of VALID_METRICS."""
    if what not in VALID_METRICS:
        raise ValueError(f"{what!r} is no validation metric; known are {', '.join(VALID_METRICS)}")
    return f"valid/{name}/{what}"


def parse_layer_metric(name: str) -> tuple[int, str] | None:
    """(layer id, what) of a name made by `layer_metric`, None for any other name."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def parse_valid_metric(name: str) -> tuple[str, str] | None:
    """(validation set, what) of a name made by `valid_metric`, None for any other name."""
    match = _VALID.fullmatch(name)
    return (match[1], match[2]) if match else None


@dataclass(frozen=True)
class Metric:
    """One row of the table: `<id>` and `<name>` in a name stand for a layer id and a validation set."""

    name: str
    unit: str
    meaning: str


TABLE: tuple[Metric, ...] = (
    Metric(STEP, "steps", "optimizer steps done"),
    Metric(TOKENS, "tokens", "training tokens consumed over all ranks; the x axis everywhere"),
    Metric(WALL_TIME, "s", "time spent in training, summed over restarts, without the time between them"),
    Metric(LOSS, "nats/token", "cross-entropy alone, without auxiliary losses"),
    Metric(PERPLEXITY, "", "exp of train/loss"),
    Metric(
        LOAD_BALANCING_LOSS, "", "weighted load-balancing loss, mean over MoE layers; equals the weight at even load"
    ),
    Metric(ROUTER_Z_LOSS, "", "weighted router z-loss, mean over MoE layers"),
    Metric("train/z_loss", "", "weighted z-loss of the LM head, when --z-loss-coefficient is given"),
    Metric("train/logit_mean", "", "mean of the LM head's logits, when --log-logit-mean is given"),
    Metric("train/loss_scale", "", "scale of the loss under fp16"),
    Metric(LR, "", "learning rate of the step"),
    Metric(GRAD_NORM, "", "norm of all gradients before clipping"),
    Metric(TRAIN_TOKENS, "tokens", "same as tokens, under open_lm's name"),
    Metric(ACTIVE_FLOPS, "FLOP", "forward and backward FLOPs of the active parameters so far"),
    Metric(TOKENS_PER_SECOND, "tokens/s", "throughput over all ranks"),
    Metric(TOKENS_PER_SECOND_PER_GPU, "tokens/s", "throughput per device"),
    Metric(MFU, "fraction", "active FLOPs per second over the devices' peak; absent where the peak is unknown"),
    Metric(
        PEAK_MEMORY,
        "GiB",
        "highest device memory allocated since the last record; resident memory of the process on CPU",
    ),
    Metric(DATA_TIME, "s/step", "waiting for data"),
    Metric(FORWARD_TIME, "s/step", "forward"),
    Metric(BACKWARD_TIME, "s/step", "backward"),
    Metric(OPTIM_STEP_TIME, "s/step", "clipping and optimizer"),
    Metric(SYNC_TIME, "s/step", "waiting for other ranks to report the loss"),
    Metric(BATCH_TIME, "s/step", "whole step"),
    Metric(DROPPED_FRACTION, "fraction", "routed slots that capacity dropped; 0 when dropless"),
    Metric(MAX_VIOLATION, "", "largest experts/layer_<id>/max_violation over the layers"),
    Metric("experts/layer_<id>/max_over_mean", "", "load of the busiest expert over the mean load; 1 is even"),
    Metric(
        "experts/layer_<id>/min_over_mean",
        "",
        "load of the idlest expert over the mean load; 1 is even, 0 is a dead expert",
    ),
    Metric("experts/layer_<id>/std_over_mean", "", "standard deviation of the load over the mean load; 0 is even"),
    Metric("experts/layer_<id>/max_violation", "", "max_over_mean - 1 (MaxVio, arXiv 2408.15664); 0 is even"),
    Metric(
        "experts/layer_<id>/entropy",
        "fraction",
        "entropy of the load over log(experts); 1 is even, 0 is one expert only",
    ),
    Metric(
        "experts/layer_<id>/load",
        "fractions",
        "share of the routed slots per expert; a list, in metrics.jsonl and as a wandb histogram",
    ),
    Metric("valid/<name>/loss", "nats/token", "cross-entropy of the validation set `name`"),
    Metric("valid/<name>/perplexity", "", "exp of valid/<name>/loss"),
)


def markdown_table() -> str:
    """The Markdown table of every metric, for the docs."""
    rows = ["| metric | unit | meaning |", "|---|---|---|"]
    rows += [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in TABLE]
    return "\n".join(rows)


def describe(name: str) -> Metric | None:
    """The row of TABLE that documents the metric `name`, None if there is none."""
    if layer := parse_layer_metric(name):
        name = f"experts/layer_<id>/{layer[1]}"
    elif valid := parse_valid_metric(name):
        name = f"valid/<name>/{valid[1]}"
    return next((m for m in TABLE if m.name == name), None)
