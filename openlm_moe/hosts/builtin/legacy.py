"""open_lm's flags that this trainer does not have: those it accepts without effect, and those it refuses and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from openlm_moe.errors import UserError
from openlm_moe.options import Option

# flag -> why it has no effect here
NO_EFFECT: dict[str, str] = {
    "--disable-meta-device": "weights are always made where they live, with the same values on any number of ranks",
    "--experimental-meta-device": "models are always built on the meta device",
    "--disable-buffer": "samples are shuffled over the whole data set, not in a buffer",
    "--fsdp-use-orig-params": "FSDP2 always keeps the original parameters",
    "--fsdp-backward-prefetch": "FSDP2 always prefetches",
    "--fsdp-limit-all-gathers": "FSDP2 always limits them",
    "--fsdp-checkpoint": "checkpoints are always sharded",
    "--ddp-static-graph": "there is no DistributedDataParallel here",
    "--force-distributed": "start one process under torchrun for that",
    "--log-local": "rank 0 logs; torchrun keeps the output of the others with --log-dir",
}

LEGACY_OPTIONS: tuple[Option, ...] = (
    Option(
        "--batch-size", "samples per optimizer step and rank: global batch size over ranks", int, group="legacy flags"
    ),
    *(Option(flag, f"no effect: {why}", bool, False, group="legacy flags") for flag, why in NO_EFFECT.items()),
)

# flag -> what replaces it. Refused, because going on without it would train something else.
GONE: dict[str, str] = {
    "--moe-weight-parallelism": "FSDP does that job: use --fsdp",
    "--dataset-type": "shards and manifests are told apart by what they hold: drop it",
    "--train-data-upsampling-factors": "use --train-data-mix-weights",
    "--data-tolerate-error-p": "a run sees all its tokens or fails: drop it",
    "--data-tolerate-num-ckpts": "a run sees all its tokens or fails: drop it",
    "--hf-fsdp-block": "the decoder layers of --hf-model are found by themselves: drop it",
    "--load-pretrained-state": "use --resume PATH, which loads the optimizer too",
    "--average": "average while training: --averagers, or --host open_lm",
    "--average-coefficients": "average while training: --averagers, or --host open_lm",
    "--log-avg-model-training-loss": "averages are evaluated on the validation sets: use --val-data",
    "--distill-model": "distillation is not done here",
    "--distill-pretrained": "distillation is not done here",
    "--use-bnb-linear": "8-bit layers are not done here",
    "--use-bn-sync": "there are no batch norms: drop it",
    "--torchscript": "use --torchcompile",
    "--trace": "use --torchcompile",
    "--copy-codebase": "params.json records version and commit: drop it",
    "--dist-url": "torchrun passes it in the environment: drop it",
    "--dist-backend": "NCCL on GPUs, gloo on CPU: drop it",
    "--no-set-device-rank": "a process takes the device that LOCAL_RANK names among the visible ones: drop it",
    "--preset-world-size": "torchrun passes it in the environment: drop it",
    "--attn-activation": "attention is softmax: drop it, or --host open_lm",
    "--attn-seq-scalar": "attention is softmax: drop it, or --host open_lm",
    "--attn-seq-scalar-alpha": "attention is softmax: drop it, or --host open_lm",
    "--val-seq-ci": "confidence intervals are not computed: drop it, or --host open_lm",
    "--val-tok-ci": "confidence intervals are not computed: drop it, or --host open_lm",
    "--val-max-pop-ci": "confidence intervals are not computed: drop it, or --host open_lm",
    "--val-iter-ci": "confidence intervals are not computed: drop it, or --host open_lm",
}


def gone(flag: str) -> str | None:
    """The line that refuses `flag` of open_lm and names what replaces it; None if it is not such a flag."""
    return f"{flag} is gone: {GONE[flag]}" if flag in GONE else None


def refuse_gone(argv: Sequence[str]) -> None:
    """Raises `UserError` for the first flag in `argv` that open_lm has and this trainer does not."""
    for word in argv:
        if message := gone(word.split("=", 1)[0]):
            raise UserError(message)


def apply(args: argparse.Namespace) -> list[str]:
    """Turns open_lm's second names into the first ones, in place. Returns what the log should say about them."""
    notes = [f"{flag} has no effect: {why}" for flag, why in NO_EFFECT.items() if getattr(args, _dest(flag))]
    if args.moe_expert_model_parallelism and args.expert_parallel == "off":
        args.expert_parallel = "auto"
    if args.delete_previous_checkpoint:
        if args.keep_last not in (None, 1):
            raise UserError(f"--delete-previous-checkpoint means --keep-last 1, but --keep-last is {args.keep_last}")
        args.keep_last = 1
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size is {args.batch_size}; it must be 1 or more")
    return notes


def global_batch_size(args: argparse.Namespace, world_size: int) -> int:
    """Samples per optimizer step over all ranks. open_lm's old --batch-size counted those of one rank."""
    if args.batch_size is None:
        return args.global_batch_size or 64
    if args.global_batch_size is not None:
        raise UserError(
            "--batch-size (per rank, legacy) and --global-batch-size both set the batch size; give one of them"
        )
    return args.batch_size * world_size


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
