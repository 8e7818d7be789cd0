"""The command line of `plan`: the trainer's flags and a few of its own -> a job -> what it needs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin import config_file, legacy
from openlm_moe.hosts.builtin.args import OPTIONS, build_parser, check_args
from openlm_moe.hosts.builtin.build import fsdp_precision
from openlm_moe.hosts.builtin.params import load_model
from openlm_moe.options import Option, add_options, moe_config_from
from openlm_moe.parallel.mesh import expert_parallel_size
from openlm_moe.plan.comparison import comparison
from openlm_moe.plan.gpus import GPU, GPUS, find_gpu
from openlm_moe.plan.job import Job
from openlm_moe.plan.report import as_dict, as_text

PLAN_OPTIONS = (
    Option("--gpus", "GPUs of the job; default: those the preset names, or 1", int, group="plan"),
    Option("--gpus-per-node", "GPUs of one node", int, 8, group="plan"),
    Option("--gpu", f"kind of GPU: {', '.join(GPUS)}; default: the preset's, or A100-80", group="plan"),
    Option("--network-gbps", "gigabits per second between nodes, one GPU's share", float, group="plan"),
    Option("--batch", "--global-batch-size: sequences per optimizer step", int, group="plan"),
    Option("--seq", "tokens of a sequence, in place of the model's", int, aliases=("--seq-len",), group="plan"),
    Option("--json", "print JSON", bool, False, group="plan"),
    Option("--published", "compare throughput with the published A100 table", bool, False, group="plan"),
)
# Norm of open_lm's MoE recipe and of its published table; unlike the trainer's default it has no biases.
RECIPE_NORM = "gain_only_layer_norm"
# First lines of a preset say what it was made for, such as `# gpus: 16 x A100-80 (2 nodes)`.
_PRESET_GPUS = re.compile(r"^# gpus: (\d+) x (\S+)", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    """Prints the plan of the job that the flags describe; returns the exit code: 1 if it does not fit, 2 for bad input.

    Without --gpus and without a preset nothing is said about fitting, and the code is 0.
    """
    try:
        args = parse(argv)
        if args.published:
            print(comparison(), end="")
            return 0
        job, gpu = job_from(args), gpu_from(args)
    except UserError as error:
        print(f"openlm_moe.plan: error: {error}", file=sys.stderr)
        return 2
    placed = args.gpus is not None
    plan = as_dict(job, gpu, placed)
    print(json.dumps(plan, indent=2) if args.json else as_text(plan))
    return 0 if not placed or plan["fits"] else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The trainer's flags, --config included, and plan's own. Raises `UserError`."""
    legacy.refuse_gone(argv)
    parser = build_parser("openlm_moe.plan")
    add_options(parser, PLAN_OPTIONS)
    args = parser.parse_args(argv)
    parser.set_defaults(model_norm=RECIPE_NORM)
    if args.config is not None:
        parser.set_defaults(**config_file.read(args.config, OPTIONS))
        made_for = _PRESET_GPUS.search(config_file.find(args.config).read_text())
        if made_for:
            parser.set_defaults(gpus=int(made_for[1]), gpu=made_for[2])
    args = parser.parse_args(argv)
    if args.model is None and not args.published:
        raise UserError("--model is missing: give a model name, a JSON file, or a preset by --config")
    if args.batch is not None:
        args.global_batch_size = args.batch
    legacy.apply(args)
    check_args(args)
    return args


def gpu_from(args: argparse.Namespace) -> GPU:
    """The GPU that --gpu names, A100-80 by default, behind the network that --network-gbps gives."""
    gpu = find_gpu(args.gpu or "A100-80")
    return gpu if args.network_gbps is None else replace(gpu, network=args.network_gbps * 1e9 / 8)


def job_from(args: argparse.Namespace) -> Job:
    """The job that a trainer would run with these flags on --gpus GPUs. Raises `UserError` where they do not fit."""
    params, moe = load_model(args.model, vars(args), moe_config_from(args))
    if args.seq is not None:
        params = replace(params, seq_len=args.seq)
    gpus = 1 if args.gpus is None else args.gpus
    hybrid = args.fsdp_hybrid or args.fsdp_hybrid_o2
    span = min(gpus, args.gpus_per_node) if hybrid else gpus
    return Job(
        params=params,
        moe=moe,
        gpus=gpus,
        gpus_per_node=args.gpus_per_node,
        global_batch_size=legacy.global_batch_size(args, gpus),
        accum_freq=args.accum_freq,
        precision="fp32" if args.precision == "fp32" else "bf16",
        fsdp=fsdp_precision(args) if args.fsdp else "off",
        hybrid=hybrid,
        reshard_after_forward=not args.fsdp_hybrid_o2,
        expert_parallel=expert_parallel_size(
            args.expert_parallel, moe.num_experts, span, min(gpus, args.gpus_per_node)
        ),
        checkpointing=args.grad_checkpointing_scope if args.grad_checkpointing else "off",
        z_loss=args.z_loss_coefficient > 0,
    )
