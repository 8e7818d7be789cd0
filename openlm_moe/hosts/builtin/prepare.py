"""Everything about a run that can be wrong is looked at here, before the run writes its first file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from openlm_moe import MoEConfig, UserError
from openlm_moe.data.corpus import Corpus
from openlm_moe.data.evaluation import EvaluationSet, open_evaluation
from openlm_moe.data.loader import TrainData, open_data
from openlm_moe.hosts.builtin import run_folder
from openlm_moe.hosts.builtin.architecture import Architecture, choose
from openlm_moe.hosts.builtin.averaging import parse_averagers
from openlm_moe.hosts.builtin.embedded import use_embedded_corpus
from openlm_moe.hosts.builtin.legacy import global_batch_size
from openlm_moe.hosts.builtin.plan import Plan
from openlm_moe.hosts.builtin.precision import Precision, make_precision
from openlm_moe.hosts.builtin.remote_sync import fetch_run
from openlm_moe.hosts.builtin.saving import CHECKPOINTS, check_same_model, find_checkpoint
from openlm_moe.hosts.builtin.targets import Masking
from openlm_moe.parallel import Checkpointer, Layout, make_layout
from openlm_moe.parallel.checkpoint import read_state
from openlm_moe.parallel.ranks import everywhere, on_main
from openlm_moe.telemetry.sinks import parse_report_to


@dataclass
class Prepared:
    """What a run will be made of. `data` and `plan` are None when a checkpoint is only evaluated."""

    args: argparse.Namespace
    layout: Layout
    architecture: Architecture
    precision: Precision
    masking: Masking
    global_batch_size: int
    folder: Path
    report_to: tuple[str, ...]
    corpus: Corpus | None
    data: TrainData | None
    validation: list[EvaluationSet]
    plan: Plan | None
    start_from: Path | None  # checkpoint to resume, to evaluate, or to take weights from
    notes: list[str]

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.layout.device.type == "cuda" else "CPU"


def prepare(args: argparse.Namespace, device: torch.device) -> Prepared:
    """Reads flags, model, data and checkpoint and checks that they fit together. Raises `UserError` on every rank.

    May write into the cache folder (the embedded corpus, shard indices), and with --remote-sync and --resume latest
    brings the run back from there.
    """
    architecture, report_to = everywhere(lambda: read_settings(args))
    layout = everywhere(lambda: lay_out(args, architecture.moe, device))
    batch = everywhere(lambda: batch_size(args, layout))

    folder = Path(args.logs) / run_folder.run_name(args, batch // layout.world_size)
    on_main(lambda: run_folder.check_folder(folder, args.resume))
    start_from = everywhere(lambda: find_start(args, folder))

    corpus = everywhere(lambda: use_embedded_corpus(args, architecture)) if args.embedded else None
    data = everywhere(lambda: _open_data(args, architecture)) if args.dataset_manifest or args.train_data else None
    validation = everywhere(lambda: _open_validation(args, architecture)) if args.val_data else []
    plan = None if data is None else everywhere(lambda: make_plan(args, data, batch, architecture.seq_len))
    if start_from is not None:
        on_main(lambda: check_same_model(read_state(start_from), architecture, start_from))
    return Prepared(
        args,
        layout,
        architecture,
        make_precision(args.precision, device),
        make_masking(args, architecture.vocab_size),
        batch,
        folder,
        report_to,
        corpus,
        data,
        validation,
        plan,
        start_from,
        [*args.notes, *moe_notes(args.moe, architecture.moe)],
    )


def read_settings(args: argparse.Namespace) -> tuple[Architecture, tuple[str, ...]]:
    """Model, MoE layers and reporters that the flags name. Raises `UserError` for what cannot be built or is absent."""
    architecture = choose(args)
    parse_averagers(args.averagers)
    report_to = parse_report_to(args.report_to)
    for package in report_to:
        if importlib.util.find_spec(package) is None:
            raise UserError(f'--report-to {package} needs: pip install "openlm-moe[{package}]"')
    names_training_data = args.embedded or args.train_data is not None or args.dataset_manifest is not None
    if not names_training_data and args.resume is None and args.pretrained is None:
        raise UserError("--val-data without training data evaluates a checkpoint: name it with --resume")
    return architecture, report_to


def lay_out(args: argparse.Namespace, moe: MoEConfig, device: torch.device) -> Layout:
    """The layout that the flags ask for in this world."""
    return make_layout(
        fsdp=args.fsdp,
        hybrid=args.fsdp_hybrid or args.fsdp_hybrid_o2,
        expert_parallel=args.expert_parallel,
        num_experts=moe.num_experts,
        device=device,
    )


def batch_size(args: argparse.Namespace, layout: Layout) -> int:
    """Samples per optimizer step over all ranks; every rank gets equal micro-batches of it."""
    batch = global_batch_size(args, layout.world_size)
    check_batch_size(batch, layout.world_size, args.accum_freq)
    return batch


def moe_notes(asked: MoEConfig, moe: MoEConfig) -> list[str]:
    """What the log should say of settings that have no effect. asked: by flags; moe: by them and the model's JSON."""
    default, wanted, got = MoEConfig().to_dict(), asked.to_dict(), moe.to_dict()
    notes = [
        f"{name} {wanted[name]} of the flags has no effect: the model's own is {got[name]}"
        for name in got
        if wanted[name] not in (default[name], got[name])
    ]
    if moe.moe_type == "dropless" and moe.capacity_factor != default["capacity_factor"]:
        notes.append(f"--moe-capacity-factor {moe.capacity_factor:g} has no effect: dropless layers have no capacity")
    return notes


def check_batch_size(batch: int, world_size: int, accum_freq: int) -> None:
    """Raises `UserError`, with sizes that would do, unless every rank gets equal micro-batches."""
    parts = world_size * accum_freq
    if batch % parts:
        below, above = batch // parts * parts, (batch // parts + 1) * parts
        raise UserError(
            f"the global batch of {batch} samples cannot be split evenly over {world_size} ranks and --accum-freq "
            f"{accum_freq}; use {f'{below} or ' if below else ''}{above}"
        )


def make_plan(args: argparse.Namespace, data: TrainData, batch: int, seq_len: int) -> Plan:
    """How long the run is. Raises `UserError` where the data hold fewer samples than it needs."""
    if args.train_num_samples is not None:
        per_epoch = args.train_num_samples // seq_len
    elif data.num_samples is None:
        raise UserError(
            "--multiple-data-passes and --dataset-resampled have no end: give --train-num-samples, in tokens"
        )
    else:
        per_epoch = data.num_samples // args.epochs
    plan = Plan(batch, seq_len, per_epoch, args.epochs)
    if per_epoch < 1 or plan.total_steps < 1:
        raise UserError(
            f"{per_epoch * args.epochs} samples of {seq_len} tokens are less than one global batch of {batch}; "
            "raise --train-num-samples (tokens per epoch) or lower --global-batch-size"
        )
    data.require(plan.total_steps * batch)
    return plan


def make_masking(args: argparse.Namespace, vocab_size: int) -> Masking:
    """open_lm's masking flags; ids below 0 count from the end of the vocabulary, as they do in its data."""
    left, pad = (
        None if token is None else token % vocab_size for token in (args.target_mask_left, args.target_mask_individual)
    )
    return Masking(left, pad, args.squash_mask_left)


def _open_data(args: argparse.Namespace, architecture: Architecture) -> TrainData:
    return open_data(
        args.dataset_manifest or args.train_data,
        seq_len=architecture.seq_len,
        seed=args.seed,
        mix_weights=args.train_data_mix_weights,
        vocab_size=architecture.vocab_size,
        multiple_data_passes=args.multiple_data_passes,
        resampled=args.dataset_resampled,
        data_key=args.data_key,
        pad_short=args.pad_short_samples,
        ignore_parse_errors=args.ignore_parse_errors,
        allow_pipe=args.allow_pipe,
        cache_dir=args.data_cache_dir,
    )


def _open_validation(args: argparse.Namespace, architecture: Architecture) -> list[EvaluationSet]:
    most = None
    if args.val_num_samples is not None:
        most = args.val_num_samples // architecture.seq_len
        if most < 1:
            raise UserError(
                f"--val-num-samples is {args.val_num_samples} tokens, less than one sample of {architecture.seq_len}"
            )
    return open_evaluation(
        args.val_data,
        seq_len=architecture.seq_len,
        vocab_size=architecture.vocab_size,
        max_samples=most,
        data_key=args.val_data_key or args.data_key,
        pad_short=args.pad_short_samples,
        ignore_parse_errors=args.ignore_parse_errors,
        allow_pipe=args.allow_pipe,
        cache_dir=args.data_cache_dir,
    )


def find_start(args: argparse.Namespace, folder: Path) -> Path | None:
    """The checkpoint that --resume or --pretrained names; None where `latest` finds nothing to go on from."""
    if args.resume != "latest":
        given = args.resume or args.pretrained
        return None if given is None else on_main(lambda: find_checkpoint(given))
    if args.remote_sync is not None:
        on_main(lambda: fetch_run(folder, f"{args.remote_sync.rstrip('/')}/{folder.name}"))
    if not on_main(lambda: run_folder.has_checkpoint(folder)):
        return None
    with contextlib.closing(Checkpointer(folder / CHECKPOINTS)) as checkpoints:
        path = checkpoints.latest()
    if path is None:
        raise UserError(f"every checkpoint in {folder / CHECKPOINTS} is damaged; start a new run with --name")
    return path
