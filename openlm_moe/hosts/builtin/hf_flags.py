"""The flags of --hf-model, and which others cannot stand beside it."""

from __future__ import annotations

import argparse

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.options import MOE_OPTIONS, Option

HF_OPTIONS: tuple[Option, ...] = (
    Option("--hf-model", "train this Hugging Face mixture of experts: a folder with its weights", group="model"),
    Option("--hf-seq-len", "tokens of a sample with --hf-model; default: the model's positions", int, group="model"),
    Option(
        "--hf-save",
        "write the Hugging Face model at the end, or with every checkpoint",
        default="end",
        choices=("end", "checkpoints"),
        group="model",
    ),
)


def check_hf_flags(args: argparse.Namespace, default_model: str) -> None:
    """Raises `UserError` for the first flag that contradicts --hf-model, or means nothing without it."""
    if args.hf_model is None:
        if args.hf_seq_len is not None:
            raise UserError("--hf-seq-len goes with --hf-model; the built-in model's JSON says its seq_len")
        return
    if args.embedded:
        raise UserError(
            "--hf-model needs data of its own tokenizer: python -m openlm_moe.data.prepare ... --tokenizer "
            f"{args.hf_model}/tokenizer.json, then --dataset-manifest"
        )
    if args.hf_seq_len is not None and args.hf_seq_len < 1:
        raise UserError(f"--hf-seq-len is {args.hf_seq_len}; it must be 1 or more")
    if args.model != default_model:
        raise UserError(f"--model {args.model} and --hf-model {args.hf_model} both name a model; give one of them")
    for option in MOE_OPTIONS:
        if getattr(args.moe, option.field) != getattr(MoEConfig(), option.field):
            raise UserError(f"{option.flag} cannot be given with --hf-model: the model's config.json says it")
    if args.expert_parallel != "off":
        raise UserError(
            f"--expert-parallel {args.expert_parallel} does not work with --hf-model, whose experts run on every "
            "rank; shard them with --fsdp"
        )
    for flag, given in (
        ("--torchcompile", args.torchcompile),
        ("--grad-checkpointing-scope experts", args.grad_checkpointing_scope == "experts"),
    ):
        if given:
            raise UserError(f"{flag} does not work with --hf-model; leave it out")
