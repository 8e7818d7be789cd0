"""Trains open_lm's own model in open_lm's own loop with our layers registered; run by torchrun, writes what it saw.

program.py OUT.pt STEPS [flags of open_lm and ours]
"""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

import openlm_moe
from openlm_moe.parallel.mesh import shutdown

BATCH, SEQ, VOCAB = 8, 16, 16


class Recorder:
    """A tensorboard writer that keeps what it is told."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append(value)

    def flush(self):
        pass


def batches(steps, rank, world):
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        yield (tokens.chunk(world)[rank].tolist(),)


class Data(list):
    num_batches = 10**6
    num_samples = 10**6


def main(out, steps, *flags):
    logging.basicConfig(level=logging.INFO)
    openlm_moe.register_open_lm()
    from open_lm import main as upstream
    from open_lm import model as upstream_model
    from open_lm.params import parse_args

    args = parse_args(["--model", "open_lm_test_tiny", "--precision", "fp32", "--log-every-n-steps", "1", *flags])
    device = upstream.init_distributed_device(args)
    args.per_gpu_batch_size = BATCH // args.world_size
    upstream.random_seed(args.seed, 0)
    model = upstream_model.create_model(args)
    args.vocab_size, args.seq_len, args.wandb = model.vocab_size, model.seq_len, False
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    if args.fsdp:
        model = upstream.FSDP(model, auto_wrap_policy=None, device_id=device, use_orig_params=args.fsdp_use_orig_params)
    averagers = None
    if args.averagers is not None:
        averagers = upstream.ModelAverager(model, args.averagers)
    recorder, norms = Recorder(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    clip = model.clip_grad_norm_ if args.fsdp else None
    if clip is not None:
        model.clip_grad_norm_ = lambda *a, **k: norms.append(float(clip(*a, **k)))
    loader = Data(batches(int(steps), args.rank, args.world_size))
    data = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=loader)}
    success, step = upstream.train_one_epoch(
        model,
        data,
        torch.nn.CrossEntropyLoss(),
        averagers=averagers,
        epoch=0,
        step=0,
        optimizer=optimizer,
        scaler=None,
        scheduler=lambda step: None,
        total_steps=10**6,
        args=args,
        tb_writer=recorder if args.rank == 0 else None,
    )
    if args.fsdp:
        config = upstream.FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        with upstream.FSDP.state_dict_type(model, upstream.StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
    else:
        state = model.state_dict()
    if args.world_size > 1:
        gathered = [None] * args.world_size
        dist.all_gather_object(gathered, norms)
        norms = gathered
    if args.rank == 0:
        torch.save({"state": state, "scalars": recorder.scalars, "norms": norms, "steps": step, "ok": success}, out)
    shutdown()
    openlm_moe.unregister_open_lm()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
