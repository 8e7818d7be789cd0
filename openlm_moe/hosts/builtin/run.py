"""From a command line to a finished run: read and check, put together, train, report."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from openlm_moe import UserError
from openlm_moe.hosts.builtin.args import parse_args
from openlm_moe.hosts.builtin.assemble import assemble, open_sinks
from openlm_moe.hosts.builtin.cpu_memory import keep_freed_memory
from openlm_moe.hosts.builtin.embedded import ngram_baselines
from openlm_moe.hosts.builtin.evaluate import evaluate
from openlm_moe.hosts.builtin.prepare import Prepared, prepare
from openlm_moe.hosts.builtin.remote_sync import RemoteSync
from openlm_moe.hosts.builtin.summary import format_table, samples, summary_table
from openlm_moe.hosts.builtin.train import Run, TrainingFailed, train, val_batch_size
from openlm_moe.parallel import Checkpointer, init_distributed, shutdown
from openlm_moe.parallel.checkpoint import read_state
from openlm_moe.parallel.ranks import ToldElsewhere
from openlm_moe_kernels.verify import KernelMismatch


def main(argv: Sequence[str]) -> int:
    """Runs one command line; returns the exit code. 0: done, or stopped as asked. 1: training failed. 2: bad input.

    Raises `UserError` for bad input on the one rank that should tell it.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        with contextlib.redirect_stderr(io.StringIO()) if rank else contextlib.nullcontext():
            args = parse_args(argv)
    except UserError:
        if rank:
            return 2
        raise
    _log_to_console(rank, args.debug)
    try:
        device = init_distributed()
        if device.type == "cpu":
            keep_freed_memory()
        code = _run(prepare(args, device))
    except ToldElsewhere:
        code = 2
    except (TrainingFailed, KernelMismatch) as error:
        if rank == 0:
            print(f"openlm_moe.main: stopped: {error}", file=sys.stderr)
        code = 1
    shutdown()
    return code


def _log_to_console(rank: int, debug: bool) -> None:
    level = logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    for noisy in ("fsspec", "urllib3", "matplotlib", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _run(p: Prepared) -> int:
    if p.plan is None:
        return _evaluate_only(p)
    run = assemble(p)
    say = run.sinks.say
    with contextlib.ExitStack() as closing:
        closing.enter_context(run.sinks)
        if p.args.remote_sync is not None and p.layout.is_main:
            target = f"{p.args.remote_sync.rstrip('/')}/{p.folder.name}"
            closing.callback(RemoteSync(p.folder, target, p.args.remote_sync_frequency, say).close)
        closing.callback(run.saver.close)
        closing.callback(run.profiler.close)
        closing.callback(run.stop.close)
        baselines = {}
        if p.corpus is not None:
            baselines = ngram_baselines(p.corpus, p.architecture.seq_len, p.args.data_cache_dir)
            say("perplexity of n-grams on the validation text: " + _listed(baselines))
        if run.done:
            say(f"nothing to do: the checkpoint is at step {run.step} of {p.plan.total_steps}")
        if not train(run):
            run.saver.checkpoints.wait()
            say(f"stopped as asked after step {run.step} of {p.plan.total_steps}; {run.saver.resume_hint(run)}")
            return 0
        _report(run, p, baselines)
    return 0


def _report(run: Run, p: Prepared, baselines: dict[str, float]) -> None:
    """The closing table, and text that the model wrote."""
    run.sinks.say(format_table(summary_table(run, baselines)))
    if p.corpus is not None:
        for text in samples(run, p.corpus.tokenizer):
            run.sinks.say(f"sample:\n{text}")


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _evaluate_only(p: Prepared) -> int:
    """Evaluates the checkpoint that --resume names on the validation sets; logs at the checkpoint's step."""
    state = read_state(p.start_from)
    with open_sinks(p, state["step"]) as sinks:
        model = p.architecture.build(p.args, p.layout)
        loader = Checkpointer(p.folder / "checkpoints")
        loader.load(p.start_from, model, None)
        loader.close()
        layout = p.layout
        evaluations = evaluate(
            model,
            p.validation,
            batch_size=val_batch_size(p.args, p.global_batch_size, layout.world_size),
            masking=p.masking,
            precision=p.precision,
            device=layout.device,
            rank=layout.rank,
            world_size=layout.world_size,
        )
        for evaluation in evaluations:
            sinks.log(evaluation.metrics(), state["step"], state.get("tokens", 0))
        rows = [
            (f"validation perplexity, {e.name}", f"{e.perplexity:.2f} over {e.tokens:,} tokens") for e in evaluations
        ]
        sinks.say(format_table([("checkpoint", str(p.start_from)), *rows]))
    return 0
