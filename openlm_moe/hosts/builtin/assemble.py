"""Puts a `Run` together from what was prepared: folder and sinks, model, optimizer, checkpoint."""

from __future__ import annotations

import os
from typing import Any

import torch

from openlm_moe.hosts.builtin import run_folder
from openlm_moe.hosts.builtin.averaging import make_averagers
from openlm_moe.hosts.builtin.count import short_count
from openlm_moe.hosts.builtin.optimizer import make_optimizer
from openlm_moe.hosts.builtin.precision import LossScale
from openlm_moe.hosts.builtin.prepare import Prepared
from openlm_moe.hosts.builtin.profiling import Profiler
from openlm_moe.hosts.builtin.saving import Saver
from openlm_moe.hosts.builtin.schedule import make_schedule
from openlm_moe.hosts.builtin.step import StepRules
from openlm_moe.hosts.builtin.train import Run
from openlm_moe.hosts.builtin.verify import verify_kernels
from openlm_moe.parallel import StopRequest
from openlm_moe.parallel.checkpoint import read_state
from openlm_moe.parallel.ranks import everywhere, on_main
from openlm_moe.telemetry.meters import StepMeter
from openlm_moe.telemetry.peaks import peak_flops
from openlm_moe.telemetry.sinks import Sinks


def open_sinks(p: Prepared, resume_step: int = 0) -> Sinks:
    """Makes the run's folder, records the settings there, and opens everything that logs."""
    settings = settings_of(p)
    on_main(lambda: run_folder.create(p.folder, settings))
    args = p.args
    if args.wandb_notes:
        os.environ["WANDB_NOTES"] = args.wandb_notes  # where wandb looks for them
    sinks = everywhere(
        lambda: Sinks(
            p.folder,
            p.report_to,
            rank=p.layout.rank,
            resume_step=resume_step,
            total_tokens=None if p.plan is None else p.plan.tokens(p.plan.total_steps),
            name=p.folder.name,
            project=args.wandb_project_name,
        )
    )
    sinks.config(settings)
    for note in p.notes:
        sinks.say(f"note: {note}")
    return sinks


def settings_of(p: Prepared) -> dict[str, Any]:
    """Every setting of the run, for params.json and for reporters."""
    flags = {key: value for key, value in vars(p.args).items() if key not in ("moe", "notes")}
    parameters = p.architecture.count()
    return {
        **flags,
        "global_batch_size": p.global_batch_size,
        "model_params": p.architecture.to_json(),
        "moe": p.architecture.moe.to_dict(),
        "parameters": {"total": parameters.total, "active": parameters.active},
        "world_size": p.layout.world_size,
        "expert_parallel_size": p.layout.expert_parallel,
        "device": p.device_name,
        "total_steps": None if p.plan is None else p.plan.total_steps,
        "corpus": None if p.corpus is None else p.corpus.record,
    }


def assemble(p: Prepared) -> Run:
    """The run, at the step of the checkpoint that it goes on from. Every rank calls it."""
    args, layout, plan, architecture = p.args, p.layout, p.plan, p.architecture
    resuming = p.start_from is not None and args.resume is not None
    same_run = resuming and args.resume == "latest"
    sinks = open_sinks(p, read_state(p.start_from)["step"] if same_run else 0)
    stop = StopRequest(args.stop_file or p.folder / run_folder.STOP_FILE)
    compute = torch.bfloat16 if args.fsdp_amp or args.fsdp_pure_bf16 else p.precision.compute_dtype
    if args.verify_kernels == "on" and architecture.moe.num_experts:
        verify_kernels(architecture.dim, architecture.moe, layout.device, compute, sinks.say)
    model = everywhere(lambda: architecture.build(args, layout))
    averagers = make_averagers(args.averagers, model)
    run = Run(
        args=args,
        layout=layout,
        folder=p.folder,
        architecture=architecture,
        plan=plan,
        model=model,
        optimizer=make_optimizer(model, args),
        schedule=make_schedule(args, plan.total_steps),
        precision=p.precision,
        scale=LossScale(p.precision.scaled),
        rules=StepRules(
            moe=architecture.moe,
            accum_freq=args.accum_freq,
            grad_clip_norm=args.grad_clip_norm,
            z_loss_coefficient=args.z_loss_coefficient,
            seed=args.seed,
            rank=layout.rank,
            world_size=layout.world_size,
            counts_vary=p.masking.active or args.pad_short_samples or args.ignore_parse_errors,
            log_logit_mean=args.log_logit_mean,
            collect=architecture.collect_losses,
        ),
        masking=p.masking,
        averagers=averagers,
        data=p.data,
        validation=p.validation,
        saver=Saver(p.folder, args, averagers),
        sinks=sinks,
        meter=StepMeter(
            layout.world_size,
            architecture.flops_per_token(),
            peak_flops(p.device_name, compute) if layout.device.type == "cuda" else None,
            layout.device,
        ),
        stop=stop,
        profiler=Profiler(p.folder, args.profile and layout.is_main, layout.device),
    )
    if resuming:
        everywhere(lambda: run.saver.restore(run, p.start_from))
        sinks.say(f"resumed {p.start_from} at step {run.step}")
    elif p.start_from is not None:
        everywhere(lambda: run.saver.load_weights(run, p.start_from))
        sinks.say(f"took the weights of {p.start_from}")
    run.first_step = run.logged_step = run.step
    parameters = architecture.count()
    sinks.say(
        f"{short_count(parameters.total)} parameters, {short_count(parameters.active)} active per token; "
        f"{plan.total_steps} steps of {plan.global_batch_size} samples of {plan.seq_len} tokens on "
        f"{layout.world_size} x {p.device_name}"
    )
    return run
