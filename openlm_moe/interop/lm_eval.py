"""Models for the lm-eval harness: a Hugging Face folder, or a checkpoint of the trainer in the built-in model.

Both are scored by the harness's own HFLM, so that a difference between them is a difference between the models.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from openlm_moe.data.tokenizer import END_TOKENS
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.generate import generate
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.run_folder import embedded_tokenizer_of
from openlm_moe.hosts.builtin.saving import find_checkpoint, model_of
from openlm_moe.interop.hf_experts import NAME, register
from openlm_moe.interop.hf_model import experts_of, read_config
from openlm_moe.interop.hf_model_files import quiet
from openlm_moe.parallel import Checkpointer
from openlm_moe.parallel.checkpoint import read_state


def make_lm(
    folder: Path,
    *,
    tokenizer: Path | None = None,
    batch_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The harness's model for `folder`: a Hugging Face model, a run's folder, or a checkpoint of one.

    tokenizer: a tokenizer.json, or a folder with one; needed where `folder` has none.
    dtype: what Hugging Face weights are held in; the built-in model keeps fp32 weights and computes in it.
    Raises `UserError`.
    """
    from lm_eval.models.huggingface import HFLM

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    mixed: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        places = [folder]
        model = load_hf(folder, dtype, trust_remote_code)
    else:
        checkpoint = find_checkpoint(str(folder))
        places = [folder, checkpoint, *checkpoint.parents[:2]]
        model = NativeModel(load_native(checkpoint))
        if dtype != torch.float32:
            mixed["mixed_precision_dtype"] = dtype
    found = load_tokenizer(tokenizer, places, trust_remote_code)
    return HFLM(pretrained=model.to(device).eval(), tokenizer=found, backend="causal", batch_size=batch_size, **mixed)


def load_hf(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """transformers' model of `folder`, with our experts where it has any that they serve. Raises `UserError`."""
    from transformers import AutoModelForCausalLM

    register()
    if not trust_remote_code:
        read_config(folder)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    if experts_of(model):
        model.set_experts_implementation(NAME)
    return model


def load_native(checkpoint: Path) -> Transformer:
    """The built-in model of a checkpoint, whole and in this process. Raises `UserError`."""
    params, moe = model_of(read_state(checkpoint), checkpoint)
    with torch.device("meta"):
        model = Transformer(params, moe)
    model.to_empty(device="cpu").tie_weights()
    reader = Checkpointer(checkpoint.parent)
    reader.load(checkpoint, model, None)
    reader.close()
    return model


def load_tokenizer(given: Path | None, places: list[Path], trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of `given`, or of the first of `places` that has one. Raises `UserError`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for place in [given] if given is not None else places:
        if (place / "tokenizer_config.json").is_file():
            try:
                return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=trust_remote_code)
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"the tokenizer in {place} cannot be used: {str(error).splitlines()[0]}") from None
        file = place if place.is_file() else place / "tokenizer.json"
        if not file.is_file() and given is None:
            file = embedded_tokenizer_of(place) or file
        if file.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
            known = [token for token in END_TOKENS if token in tokenizer.get_vocab()]
            if known:
                tokenizer.add_special_tokens({"eos_token": known[0]})
            return tokenizer
    listed = ", ".join(map(str, places)) if given is None else str(given)
    raise UserError(f"there is no tokenizer.json in {listed}; name it with --tokenizer")


class NativeModel(nn.Module):
    """The built-in model with as much of transformers' surface as HFLM uses."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(
            model_type="openlm_moe",
            max_position_embeddings=model.params.seq_len,
            vocab_size=model.params.vocab_size,
        )

    @property
    def device(self) -> torch.device:
        return self.model.output.weight.device

    def tie_weights(self) -> None:
        """Nothing: they are as the checkpoint's model has them."""

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """tokens (B, S) -> logits (B, S, V). Rows may be padded at the right, since attention is causal."""
        return SimpleNamespace(logits=self.model(input_ids))

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_length: int,
        pad_token_id: int,
        stopping_criteria: Any = None,
        use_cache: bool = True,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor:
        """Continues each row, padded at the left, to `max_length`; the harness cuts at the task's stop strings."""
        new = max_length - input_ids.shape[1]
        how = {"temperature": temperature if do_sample else 0.0, "top_k": top_k}
        rows = [
            generate(self.model, row[seen.bool()].tolist(), new, **how)
            for row, seen in zip(input_ids, attention_mask, strict=True)
        ]
        return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)
