"""What `run.py` measures beside the benchmarks: peak memory against the plan, training against a CPU, numerics."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openlm_moe import MoEConfig, collect_losses
from openlm_moe.hosts.builtin.lm_loss import summed_loss
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import estimate_memory
from results import records

VOCAB, SEQ_LEN, BATCH = 256, 128, 8
EARLY = 10  # steps whose losses must be the CPU's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    memory_ = commands.add_parser("memory", help="peak of a training step with 8 experts, and the plan's")
    memory_.add_argument("--model", required=True)
    memory_.add_argument("--seq-len", type=int, required=True)
    memory_.add_argument("--sequences", type=int, required=True)
    train_ = commands.add_parser("train", help="a training run here, and the same on a CPU with the reference backend")
    train_.add_argument("--steps", type=int, required=True)
    train_.add_argument("--dim", type=int, required=True)
    train_.add_argument("--folder", type=Path, required=True)
    numerics_ = commands.add_parser("numerics", help="the kernels against float64")
    numerics_.add_argument("backend")
    for command in (memory_, numerics_):
        command.add_argument("--device", required=True)
    for command, function in ((memory_, memory), (train_, train), (numerics_, numerics)):
        command.add_argument("--json", type=Path, required=True)
        command.set_defaults(function=function)
    options = parser.parse_args()
    options.json.write_text(json.dumps(options.function(options)))


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a step of 8 experts in bf16 autocast: what the plan says and, on a GPU, the allocator's peak."""
    params = replace(load_model_params(options.model), seq_len=options.seq_len)
    moe = MoEConfig(num_experts=8)
    plan = estimate_memory(Job(params, moe, global_batch_size=options.sequences, device=options.device))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(params, moe)
    model.to_empty(device=options.device).init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, params.vocab_size, (options.sequences, options.seq_len + 1), device=options.device)
    for _ in range(2):  # the moments are made in the first
        with collect_losses(model):
            with torch.autocast(options.device, torch.bfloat16):
                logits = model(tokens[:, :-1])
            (summed_loss(logits, tokens[:, 1:]).cross_entropy / tokens[:, 1:].numel()).backward()
        gradients = sum(p.grad.nbytes for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim() > 0)
    held = sum(p.nbytes for p in model.parameters()) + gradients + moments
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    return {
        "model": Path(options.model).stem,
        "plan": plan.peak(),
        "plan_state": plan.state,
        "state": held,
        "peak": peak,
    }


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of every step here and on a CPU: the same command, seeds and data, in fp32."""
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    write_data(options.folder, options.steps * BATCH)
    shape = {"hidden_dim": options.dim, "n_layers": 4, "n_heads": 2, "seq_len": SEQ_LEN, "vocab_size": VOCAB}
    (options.folder / "model.json").write_text(json.dumps({**shape, "post_embed_norm": False, "weight_tying": False}))
    here = losses(options, "here", "auto", {})
    cpu = losses(options, "cpu", "reference", {"CUDA_VISIBLE_DEVICES": ""})
    apart = [abs(a - b) / b for a, b in zip(here, cpu, strict=True)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    early = max(apart[:EARLY])
    shutil.rmtree(options.folder)
    if early > 1e-4:
        raise SystemExit(
            f"losses of the first {EARLY} steps are apart by {early:.1e} of the CPU's: {here[:EARLY]}, {cpu[:EARLY]}"
        )
    return {"device": device, "here": here, "cpu": cpu, "early": early, "largest": max(apart)}


def losses(options: argparse.Namespace, name: str, backend: str, env: dict[str, str]) -> list[float]:
    """Training loss of each step of `openlm_moe.main` in a process of its own."""
    flags = {
        "--model": options.folder / "model.json",
        "--dataset-manifest": options.folder / "manifest.jsonl",
        "--train-num-samples": options.steps * BATCH * SEQ_LEN,
        "--epochs": 1,
        "--global-batch-size": BATCH,
        "--experts": 8,
        "--moe-every": 2,
        "--moe-backend": backend,
        "--precision": "fp32",
        "--lr": 3e-3,
        "--warmup": 20,
        "--seed": 0,
        "--workers": 0,
        "--log-every-n-steps": 1,
        "--logs": options.folder,
        "--name": name,
    }
    command = [sys.executable, "-m", "openlm_moe.main", *(str(word) for pair in flags.items() for word in pair)]
    subprocess.run(command, check=True, env={**os.environ, **env})
    rows = records.read(options.folder / name / "metrics.jsonl")
    return [row["train/loss"] for row in rows if "train/loss" in row]


def write_data(folder: Path, samples: int) -> None:
    """One shard of sequences that can be learnt: most tokens follow from the one before.

    Written with tarfile, since the machine may lack webdataset, which `openlm_moe.data.shards.write_shard` needs.
    """
    generator = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCAB, generator=generator)
    sequences = torch.randint(0, VOCAB, (samples, SEQ_LEN + 1), generator=generator)
    noise = torch.rand(samples, SEQ_LEN + 1, generator=generator) < 0.2
    for i in range(1, SEQ_LEN + 1):
        sequences[:, i] = torch.where(noise[:, i], sequences[:, i], follows[sequences[:, i - 1]])
    with tarfile.open(folder / "shard_000.tar", "w") as tar:
        for number, sequence in enumerate(sequences.tolist()):
            data = gzip.compress(json.dumps(sequence).encode(), mtime=0)
            member = tarfile.TarInfo(f"{number:08d}.json.gz")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (folder / "manifest.jsonl").write_text(json.dumps({"shard": "shard_000", "num_sequences": samples}) + "\n")


def numerics(options: argparse.Namespace) -> list[dict[str, Any]]:
    from results.numerics.measure import measure

    return measure(options.backend, options.device)


if __name__ == "__main__":
    main()
