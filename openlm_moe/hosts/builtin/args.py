"""The trainer's flags, under open_lm's names and with open_lm's meanings: one table, and how a command line is read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin import config_file, legacy
from openlm_moe.hosts.builtin.hf_flags import HF_OPTIONS, check_hf_flags
from openlm_moe.hosts.builtin.params import MODEL_OPTIONS
from openlm_moe.options import MOE_OPTIONS, Option, Parser, add_options, moe_config_from

PRECISIONS = ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "fp32")
DEFAULT_MODEL = "open_lm_1b"
# What a run without any data flag is: a small MoE on the embedded corpus. Flags and --config win over these.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "model": "embedded",
    "train_num_samples": 2_400_256,
    "epochs": 1,
    "global_batch_size": 8,
    "lr": 6e-3,
    "warmup": 80,
    "wd": 0.1,
    "beta2": 0.95,
    "grad_clip_norm": 1.0,
    "lr_cooldown_end": 1e-4,
    "log_every_n_steps": 50,
    "workers": 0,
}


def _table(group: str, *rows: tuple[Any, ...]) -> tuple[Option, ...]:
    """Options from rows (flag, type, default, help[, more keyword arguments of Option])."""
    return tuple(Option(f, h, t, d, group=group, **(more[0] if more else {})) for f, t, d, h, *more in rows)


def _expert_parallel(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto, off nor a number of ranks")
    return int(text)


DATA_OPTIONS = _table(
    "data",
    ("--train-data", str, None, "tar shards to train on; brace patterns, and `::` between sources", {"nargs": "+"}),
    ("--dataset-manifest", str, None, "manifest.jsonl of each source to train on", {"nargs": "+"}),
    ("--train-data-mix-weights", float, None, "share of the samples that each source gives", {"nargs": "+"}),
    ("--train-num-samples", int, None, "tokens per epoch; default: all that the sources hold"),
    ("--val-data", str, None, "validation sets, evaluated one by one; `::` joins shards into one set", {"nargs": "+"}),
    ("--val-num-samples", int, None, "tokens of each validation set to evaluate; default: all"),
    ("--data-key", str, "auto", "extension of the samples in the shards, such as json.gz; auto takes what is there"),
    ("--val-data-key", str, None, "the same for each validation set", {"nargs": "+"}),
    ("--multiple-data-passes", bool, False, "start over when the sources are used up"),
    ("--dataset-resampled", bool, False, "draw shards with replacement, without end"),
    ("--ignore-parse-errors", bool, False, "leave out samples that cannot be read, instead of stopping"),
    ("--pad-short-samples", bool, False, "pad samples shorter than the sequence length, instead of stopping"),
    ("--allow-data-change", bool, False, "resume although sources or mix weights are not those of the checkpoint"),
    ("--data-cache-dir", str, None, "folder for the embedded corpus and copies of remote shards"),
    ("--allow-pipe", bool, False, "run `pipe:` commands in data paths through a shell"),
    ("--workers", int, 1, "loader processes per rank; 0 loads in the training process"),
    ("--target-mask-left", int, None, "no loss up to and including the last of this token in a sample"),
    ("--target-mask-individual", int, None, "padding token: no loss on it and no routing for it"),
    ("--squash-mask-left", bool, False, "take --target-mask-left out and pad with --target-mask-individual"),
)

START_OPTIONS = _table(
    "start",
    ("--config", str, None, "YAML or JSON file of flags, or the name of a preset; flags on the command line win"),
    (
        "--host",
        str,
        "builtin",
        "who trains: this trainer, or an installed open_lm",
        {"choices": ("builtin", "open_lm")},
    ),
)

MORE_MODEL_OPTIONS = _table(
    "model",
    ("--attn-name", str, "auto", "attention; both are torch's SDPA", {"choices": ("auto", "torch_attn")}),
    ("--pretrained", str, None, "start from the weights of this checkpoint, at step 0"),
)

TRAINING_OPTIONS = _table(
    "training",
    ("--epochs", int, 32, "epochs of --train-num-samples tokens"),
    ("--global-batch-size", int, None, "samples per optimizer step over all ranks (default 64)"),
    ("--accum-freq", int, 1, "micro-batches per optimizer step"),
    ("--optimizer", str, "adamw", "the optimizer", {"choices": ("adamw",)}),
    ("--lr", float, 5e-4, "peak learning rate"),
    ("--beta1", float, 0.9, "Adam's beta 1"),
    ("--beta2", float, 0.95, "Adam's beta 2"),
    ("--eps", float, 1e-8, "Adam's epsilon"),
    ("--wd", float, 0.2, "weight decay of matrices; gains and biases have none"),
    ("--warmup", int, 10000, "steps of linear warm-up"),
    (
        "--lr-scheduler",
        str,
        "cosine",
        "learning rate after warm-up",
        {"choices": ("cosine", "const", "const-cooldown")},
    ),
    ("--epochs-cooldown", int, None, "const-cooldown: cool down over the last n epochs"),
    ("--lr-cooldown-end", float, 0.0, "learning rate at the end (cosine, const-cooldown)"),
    ("--lr-cooldown-power", float, 1.0, "const-cooldown: power of the polynomial decay; 1 is linear"),
    ("--force-min-lr", float, 0.0, "cosine: never go below this after warm-up"),
    ("--skip-scheduler", bool, False, "keep --lr constant from the first step"),
    ("--grad-clip-norm", float, None, "clip the global gradient norm to this"),
    ("--z-loss-coefficient", float, 0.0, "weight of the z-loss on the LM head's logits"),
    (
        "--precision",
        str,
        None,
        "arithmetic; master weights stay fp32 (bf16 means amp_bf16, fp16 means amp); default: amp_bf16, fp32 on CPU",
        {"choices": PRECISIONS},
    ),
    ("--grad-checkpointing", bool, False, "recompute activations in backward"),
    (
        "--grad-checkpointing-scope",
        str,
        "block",
        "what is recomputed: whole blocks, or the experts alone",
        {"choices": ("block", "experts")},
    ),
    ("--torchcompile", bool, False, "compile the dense blocks"),
    ("--averagers", str, None, "weight averages kept along, such as ema_0.999,poly_8_10 (name_parameter_every)"),
    ("--seed", int, 0, "seed of initial weights, data order and noise"),
    (
        "--verify-kernels",
        str,
        "on",
        "compare the experts' kernels with plain arithmetic before step 0",
        {"choices": ("on", "off")},
    ),
)

DISTRIBUTED_OPTIONS = _table(
    "distributed",
    ("--fsdp", bool, False, "shard parameters, gradients and optimizer state (FSDP2)"),
    ("--fsdp-amp", bool, False, "FSDP: bf16 parameters, fp32 gradient reduction"),
    ("--fsdp-pure-bf16", bool, False, "FSDP: bf16 parameters and bf16 gradient reduction"),
    ("--fsdp-hybrid", bool, False, "FSDP: shard within a node, replicate over nodes"),
    ("--fsdp-hybrid-o2", bool, False, "as --fsdp-hybrid, and keep parameters gathered between forward and backward"),
    ("--fsdp-cpu-offload", bool, False, "FSDP: keep parameters and optimizer state in CPU memory"),
    (
        "--expert-parallel",
        _expert_parallel,
        "off",
        "ranks that share one set of experts: a number, auto or off",
        {"metavar": "N|auto|off"},
    ),
    ("--moe-expert-model-parallelism", bool, False, "open_lm's name of --expert-parallel auto"),
)

LOGGING_OPTIONS = _table(
    "logging and checkpoints",
    ("--logs", str, "./logs/", "folder of all runs; use --output under `torchrun -m`", {"aliases": ("--output",)}),
    ("--name", str, None, "name of this run; default: date, model, learning rate, batch size"),
    ("--resume", str, None, "`latest` of this run, or the path of a checkpoint folder"),
    ("--save-frequency", int, 1, "save a checkpoint every n epochs; 0: at the end only"),
    ("--save-every-n-steps", int, 0, "save a checkpoint every n steps as well"),
    ("--save-most-recent", bool, False, "save at every epoch, between two of --save-frequency in place of the last"),
    ("--delete-previous-checkpoint", bool, False, "open_lm's name of --keep-last 1"),
    ("--keep-last", int, None, "checkpoints to keep; default: all"),
    ("--val-frequency", int, 1, "evaluate every n epochs, and always after the last"),
    (
        "--global-val-batch-size",
        int,
        None,
        "samples per evaluation step over all ranks; default: those of a micro-batch",
    ),
    ("--log-every-n-steps", int, 100, "steps between two log lines"),
    ("--log-logit-mean", bool, False, "log the mean logit"),
    ("--report-to", str, "", "wandb, tensorboard, `wandb,tensorboard` or all; metrics.jsonl is always written"),
    ("--wandb-project-name", str, "open-lm", "wandb project"),
    ("--wandb-notes", str, "", "wandb notes"),
    ("--remote-sync", str, None, "copy the run folder to this place (s3://, gs://, a path ...)"),
    ("--remote-sync-frequency", int, 300, "seconds between two copies"),
    ("--remote-sync-protocol", str, "fsspec", "both go through fsspec", {"choices": ("s3", "fsspec")}),
    (
        "--stop-file",
        str,
        None,
        "stop, save and exit with code 0 once this file exists; default: `stop` in the run folder",
    ),
    ("--profile", bool, False, "record a trace and a memory snapshot of a few steps"),
    ("--debug", bool, False, "log more"),
)

TRAINER_OPTIONS: tuple[Option, ...] = (
    *START_OPTIONS,
    *DATA_OPTIONS,
    *MODEL_OPTIONS,
    *MORE_MODEL_OPTIONS,
    *HF_OPTIONS,
    *TRAINING_OPTIONS,
    *DISTRIBUTED_OPTIONS,
    *LOGGING_OPTIONS,
)
OPTIONS: tuple[Option, ...] = (*TRAINER_OPTIONS, *MOE_OPTIONS, *legacy.LEGACY_OPTIONS)


def build_parser(prog: str = "openlm_moe.main") -> Parser:
    """The parser of every flag of the trainer and the MoE layers."""
    parser = Parser(prog=prog, description="Trains dropless mixture-of-experts language models.")
    add_options(parser, OPTIONS)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads a command line. Precedence: flags, then --config, then the embedded run's values if no data is named.

    The namespace also holds `moe`, the MoEConfig, and `embedded`, whether the embedded corpus is used.
    Raises `UserError` for values that do not fit together; unknown flags end the process with code 2.
    """
    legacy.refuse_gone(argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    values = config_file.read(args.config, OPTIONS) if args.config is not None else {}
    names_data = any(
        getattr(args, key) is not None or values.get(key) is not None
        for key in ("train_data", "dataset_manifest", "val_data")
    )
    parser.set_defaults(**{"model": DEFAULT_MODEL} | ({} if names_data else EMBEDDED_DEFAULTS) | values)
    args = parser.parse_args(argv)
    args.embedded = not names_data
    args.moe = moe_config_from(args)
    args.notes = legacy.apply(args)
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Raises `UserError` for the first value that is out of range or contradicts another."""
    for name in ("epochs", "accum_freq", "log_every_n_steps", "val_frequency", "remote_sync_frequency"):
        _at_least(args, name, 1)
    for name in ("warmup", "save_frequency", "save_every_n_steps", "workers", "lr", "lr_cooldown_end", "force_min_lr"):
        _at_least(args, name, 0)
    for name in ("wd", "z_loss_coefficient", "eps"):
        _at_least(args, name, 0)
    if not -(2**63) <= args.seed < 2**63:
        raise UserError(f"--seed is {args.seed}; it must fit into 64 bits")
    for name in ("global_batch_size", "global_val_batch_size", "keep_last", "epochs_cooldown", "train_num_samples"):
        if getattr(args, name) is not None:
            _at_least(args, name, 1)
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"{_flag(name)} is {getattr(args, name)}; it must be at least 0 and below 1")
    if args.grad_clip_norm is not None and not args.grad_clip_norm > 0:  # NaN is refused too
        raise UserError(f"--grad-clip-norm is {args.grad_clip_norm}; it must be above 0")
    if args.train_data is not None and args.dataset_manifest is not None:
        raise UserError("--train-data and --dataset-manifest both name training data; give one of them")
    if args.lr_scheduler == "const-cooldown" and args.epochs_cooldown is None:
        raise UserError("--lr-scheduler const-cooldown needs --epochs-cooldown, the number of epochs to cool down over")
    if args.epochs_cooldown is not None and args.epochs_cooldown > args.epochs:
        raise UserError(f"--epochs-cooldown is {args.epochs_cooldown}, more than --epochs {args.epochs}")
    _check_masks(args)
    _check_fsdp(args)
    check_hf_flags(args, DEFAULT_MODEL)
    if args.val_data_key is not None and len(args.val_data_key) != len(args.val_data or ()):
        raise UserError(
            f"--val-data-key has {len(args.val_data_key)} keys for {len(args.val_data or ())} validation sets"
        )
    if args.resume is not None and args.pretrained is not None:
        raise UserError("--resume continues a run and --pretrained starts one; give one of them")


def _check_masks(args: argparse.Namespace) -> None:
    if args.squash_mask_left and None in (args.target_mask_left, args.target_mask_individual):
        raise UserError("--squash-mask-left needs --target-mask-left and --target-mask-individual")
    if args.target_mask_left is not None and args.target_mask_left == args.target_mask_individual:
        raise UserError(
            f"--target-mask-left and --target-mask-individual are both {args.target_mask_left}; they must differ"
        )


def _check_fsdp(args: argparse.Namespace) -> None:
    parts = [
        f
        for f in ("fsdp_amp", "fsdp_pure_bf16", "fsdp_hybrid", "fsdp_hybrid_o2", "fsdp_cpu_offload")
        if getattr(args, f)
    ]
    if parts and not args.fsdp:
        raise UserError(f"{_flag(parts[0])} means nothing without --fsdp; add --fsdp")
    if args.fsdp and args.precision in ("amp", "fp16"):
        raise UserError(f"--precision {args.precision} does not work with --fsdp; use amp_bf16")
    if args.fsdp_amp and args.fsdp_pure_bf16:
        raise UserError("--fsdp-amp and --fsdp-pure-bf16 differ in the gradients' dtype; give one of them")
    if args.fsdp_hybrid and args.fsdp_hybrid_o2:
        raise UserError("give --fsdp-hybrid or --fsdp-hybrid-o2, not both")


def _at_least(args: argparse.Namespace, name: str, least: float) -> None:
    if not least <= getattr(args, name) < math.inf:  # NaN is refused too
        raise UserError(f"{_flag(name)} is {getattr(args, name)}; it must be {least} or more, and finite")


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")
