"""A tiny random Mixtral, and what the tests of both directions do with Hugging Face folders. See conftest.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openlm_moe import MoEConfig
from openlm_moe.convert.__main__ import main
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import load_model
from openlm_moe.hosts.builtin.saving import find_checkpoint
from openlm_moe.parallel import Checkpointer

VOCAB, CONTEXT = 53, 40
# Grouped queries, matrices that are not square, sizes that no tile divides
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 5e4,
    "rms_norm_eps": 1e-4,
    "initializer_range": 0.2,
}


def make_mixtral(folder: Path, dtype: torch.dtype = torch.float32, stacked: bool = False, **save: Any) -> Path:
    """`folder` with a random Mixtral as transformers writes it, or under transformers 5's own names (`stacked`)."""
    from safetensors.torch import save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE)).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder, **save)
    if stacked:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "</s>", "id": 7}]}')
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def native(folder: Path, file: Path | None = None) -> Transformer:
    """The built-in model as the trainer makes it from what hf-to-openlm wrote: model.json, or `file`, and weights."""
    params, moe = load_model(str(file or folder / "model.json"), {}, MoEConfig())
    model = Transformer(params, moe)
    Checkpointer(folder).load(find_checkpoint(str(folder)), model, None)
    return model.eval()


@torch.no_grad()
def hf_logits(folder: Path, tokens: Tensor, **how: Any) -> Tensor:
    """Logits by transformers."""
    from transformers import AutoModelForCausalLM

    if not how:
        how["experts_implementation"] = "eager"  # its grouped GEMM wants sizes that tiles divide
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()(tokens).logits


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line with which `convert` refuses."""
    assert main(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def set_config(folder: Path, **changes: Any) -> None:
    """Changes fields of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def convert(*arguments: Any) -> None:
    """Runs `python -m openlm_moe.convert` with these words, which must go well."""
    assert main(list(map(str, arguments))) == 0
