"""Tiny Hugging Face folders with a tokenizer of their own, shards made with it, and transformers' own training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe.data.loader import open_data
from openlm_moe.data.prepare import prepare
from openlm_moe.data.tokenizer import train_byte_bpe
from openlm_moe.interop import hf_families
from openlm_moe.main import main

SEQ_LEN, BATCH, STEPS, VOCAB = 24, 8, 20, 320
LR, WD, COEFFICIENT = 1e-3, 0.1, 0.05
WORDS = ("the", "router", "sends", "each", "token", "to", "two", "experts", "and", "adds", "what", "they", "say")
END = "<|endoftext|>"


@dataclass
class Case:
    """A family's folder, its data, and runs of the trainer on them."""

    family: str
    folder: Path  # of runs
    model: Path
    data: Path

    def flags(self, *more: Any, name: str = "run", steps: int = STEPS) -> list[str]:
        fixed = f"--hf-model {self.model} --hf-seq-len {SEQ_LEN} --dataset-manifest {self.data} --workers 0 --seed 1"
        length = f"--train-num-samples {steps * BATCH * SEQ_LEN} --epochs 1 --global-batch-size {BATCH}"
        how = f"--lr {LR} --wd {WD} --skip-scheduler --logs {self.folder} --name {name} --log-every-n-steps 1"
        return [*f"{fixed} {length} {how}".split(), *map(str, more)]

    def start(self, *more: Any, name: str = "run", steps: int = STEPS) -> int:
        """Runs the trainer in this process; returns its exit code."""
        return main(self.flags(*more, name=name, steps=steps))

    def metric(self, key: str, name: str = "run") -> dict[int, float]:
        """Step -> what metrics.jsonl says of `key`."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return {r["step"]: r[key] for r in map(json.loads, lines) if key in r}

    def exported(self, name: str = "run", step: int = STEPS) -> Path:
        return self.folder / name / "hf" / f"step_{step:07d}"

    def batches(self, steps: int = STEPS) -> list[Tensor]:
        """The tokens (B, S + 1) of each step of a run."""
        data = open_data([str(self.data)], seq_len=SEQ_LEN, seed=1, vocab_size=VOCAB)
        return [batch["tokens"] for batch in data.batches(BATCH, num_batches=steps)]

    def eager(self, parts: int = 1, steps: int = STEPS) -> tuple[list[float], list[float]]:
        """transformers' own model trained by torch's AdamW: cross-entropies and weighted auxiliary losses, by step."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, experts_implementation="eager").train()
        coefficient = model.config.router_aux_loss_coef
        groups = [[p for p in model.parameters() if (p.dim() >= 2) == matrices] for matrices in (True, False)]
        optimizer = torch.optim.AdamW(
            [{"params": members, "weight_decay": wd} for members, wd in zip(groups, (WD, 0.0), strict=True)],
            lr=LR,
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        losses, auxiliary = [], []
        for tokens in self.batches(steps):
            optimizer.zero_grad()
            sums = [0.0, 0.0]
            for part in tokens.chunk(parts):
                out = model(part[:, :-1], output_router_logits=True)
                loss = F.cross_entropy(out.logits.flatten(0, 1), part[:, 1:].flatten()) / parts
                balancing = coefficient * out.aux_loss / parts
                (loss + balancing).backward()
                sums = [sums[0] + loss.item(), sums[1] + balancing.item()]
            optimizer.step()
            losses.append(sums[0])
            auxiliary.append(sums[1])
        return losses, auxiliary


def write_model(folder: Path, family: str, texts: list[str], **settings: Any) -> Path:
    """A tiny random model of the family with a tokenizer for `texts`, as a Hugging Face folder."""
    from transformers import PreTrainedTokenizerFast

    hf_families.tiny_model(family, torch.float32, vocab_size=VOCAB, **settings).save_pretrained(folder)
    train_byte_bpe(texts, 300, folder / "bpe.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"), eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    (folder / "bpe.json").unlink()
    return folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents that a tiny model can learn something of."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(300):
        start, stride = torch.randint(0, 13, (2,), generator=generator).tolist()
        out.append(" ".join(WORDS[(start + (stride % 3 + 1) * i) % 13] for i in range(20)) + ".")
    return out


@pytest.fixture(scope="session")
def hf_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`hf_folder(family, **config)`: a new folder with a tiny model and its tokenizer."""

    def make(family: str, **settings: Any) -> Path:
        return write_model(tmp_path_factory.mktemp(family) / "model", family, texts, **settings)

    return make


@pytest.fixture(scope="session")
def hf_case(
    texts: list[str], hf_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Case]:
    """`hf_case(family, **config)`: the family's `Case`; the auxiliary loss weighs enough to be seen."""
    made: dict[str, Case] = {}
    folder = tmp_path_factory.mktemp("hf_data")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(family: str, **settings: Any) -> Case:
        key = json.dumps([family, settings])
        if key not in made:
            model = hf_folder(family, router_aux_loss_coef=COEFFICIENT, **settings)
            if not made:  # all have the same tokenizer
                tokenizer = str(model / "tokenizer.json")
                prepare([str(folder / "text.jsonl")], folder / "shards", tokenizer=tokenizer, seq_len=SEQ_LEN)
            runs = tmp_path_factory.mktemp("runs")
            made[key] = Case(family, runs, model, folder / "shards" / "manifest.jsonl")
        return made[key]

    return make
