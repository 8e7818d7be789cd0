"""A checkpoint of ours to a Hugging Face folder: safetensors, config.json, tokenizer. On the CPU, layer by layer.

SwiGLU experts in every layer, normalised weights and RMSNorm make a plain Mixtral. Any other model becomes one with
its own code in the folder (loaded with trust_remote_code=True), which needs transformers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from openlm_moe import MoEConfig
from openlm_moe.convert import hf_custom, hf_mixtral
from openlm_moe.convert.hf_folder import Spec, parse_size, read_config, write_weights
from openlm_moe.convert.hf_links import (
    Link,
    add_dtype_arguments,
    by_ours,
    check_links,
    check_same,
    chosen_dtype,
    independent,
    our_tensors,
)
from openlm_moe.data.tokenizer import END_TOKENS
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.hosts.builtin.run_folder import embedded_tokenizer_of
from openlm_moe.hosts.builtin.saving import find_checkpoint, model_of
from openlm_moe.interop.hf_model_files import carry, complete_folder
from openlm_moe.parallel.checkpoint import read_checked_index, read_state
from openlm_moe.parallel.safe_reader import read_tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="step_ folder, or the folder of a run or of hf-to-openlm")
    parser.add_argument("output", type=Path, help="Hugging Face folder to make")
    parser.add_argument(
        "--format",
        choices=("auto", "mixtral", "custom"),
        default="auto",
        help="auto: a Mixtral where the model is one, otherwise a custom model (default)",
    )
    add_dtype_arguments(parser)
    parser.add_argument(
        "--expert-names",
        choices=("each", "stacked"),
        default="each",
        help="a Mixtral's experts as files name them (default), or stacked, as transformers 5 holds them",
    )
    parser.add_argument("--max-shard-size", type=parse_size, default="5GB", help="bytes of a file (default 5GB)")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer goes along; default: the checkpoint's")


def run(arguments: argparse.Namespace) -> None:
    """Converts, and says what was written."""
    checkpoint = find_checkpoint(str(arguments.checkpoint))
    state = read_state(checkpoint)
    params, moe = model_of(state, checkpoint)
    mixtral = is_mixtral(params, moe, arguments.format)
    base = state.get("hf_config", {})
    if base.get("model_type") != ("mixtral" if mixtral else hf_custom.MODEL_TYPE):
        base = {}
    config = (hf_mixtral if mixtral else hf_custom).write(params, moe, base)
    index = read_checked_index(checkpoint)
    stored = stored_tensors(index)
    ours = our_tensors(params, moe)
    check_same({name: t.shape for name, t in ours.items()}, {n: t.shape for n, t in stored.items()}, str(checkpoint))
    if mixtral:
        links = hf_mixtral.links(params, moe, arguments.expert_names == "stacked")
    else:
        links = hf_custom.links(params, moe)
    specs = [Spec(link.hf, *_kind(link, stored, arguments)) for link in links]
    check_links(links, independent(ours, params), {spec.name: spec.shape for spec in specs}, str(checkpoint))

    with complete_folder(arguments.output) as aside:
        count = write_weights(aside, specs, tensors(checkpoint, links, stored), arguments.max_shard_size)
        carried = carry(tokenizer_places(arguments.tokenizer, arguments.checkpoint, checkpoint), aside)
        if arguments.tokenizer and not carried:
            raise UserError(f"--tokenizer {arguments.tokenizer} holds no tokenizer")
        describe_tokenizer(aside)
        largest = max(specs, key=lambda spec: spec.size)
        config |= {"torch_dtype": str(largest.dtype).removeprefix("torch.")}
        config.pop("dtype", None)
        if not base:
            config |= token_ids(carried)
        (aside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if not mixtral:
            hf_custom.copy_code(aside)
    kind = "a Mixtral" if mixtral else "a custom model, to be loaded with trust_remote_code=True"
    print(
        f"{arguments.output}: {kind}; {len(specs)} tensors in {count} file{'s'[: count > 1]}; each of {len(stored)} "
        f"tensors used once; {'with' if carried else 'without'} tokenizer"
    )


def is_mixtral(params: ModelParams, moe: MoEConfig, wanted: str) -> bool:
    """Whether to export a Mixtral. Raises `UserError` if that is wanted and cannot be."""
    hf_custom.refuse(moe)
    differences = hf_mixtral.differences(params, moe)
    if wanted == "mixtral" and differences:
        raise UserError(f"the model is no Mixtral: its {'; '.join(differences)}; leave --format mixtral away")
    return wanted != "custom" and not differences


def stored_tensors(index: Metadata) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, on the meta device."""
    prefix = "model."
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def tensors(checkpoint: Path, links: list[Link], stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The other side's tensors with their names; one of ours is held at a time."""
    for name, out in by_ours(links).items():
        whole = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        read_tensors({"model": {name: whole}}, checkpoint, alone=True)
        for link in out:
            yield link.hf, link.to_hf(whole)


def tokenizer_places(given: Path | None, named: Path, checkpoint: Path) -> Iterator[Path]:
    """Folders that may hold the tokenizer: the `given` one; else the checkpoint's and the run's, by their names.

    A run on the embedded corpus holds none; its tokenizer is in the corpus's cache.
    """
    if given is not None:
        yield given
        return
    runs = [named, *checkpoint.parents[:2]]
    yield from runs
    for run in runs:
        with contextlib.suppress(UserError):  # another Python's corpus: the model goes without its tokenizer
            if tokenizer := embedded_tokenizer_of(run):
                yield tokenizer.parent


def token_ids(place: Path | None) -> dict[str, int | list[int] | None]:
    """What begins, ends and pads texts, by the config.json beside the tokenizer, else by the tokenizer itself.

    Texts follow each other with an end token between them in training, so that it also begins them.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if place is not None and (place / "config.json").is_file():
        config = read_config(place)
        return {name: config.get(name) for name in names}
    end = None if place is None else end_token(place)[1]
    return dict(zip(names, (end, end, None), strict=True))


def describe_tokenizer(folder: Path) -> None:
    """Gives a lone tokenizer.json the file by which transformers' AutoTokenizer knows what it is."""
    file = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and not file.is_file():
        end, _ = end_token(folder)
        tokens = {} if end is None else {"bos_token": end, "eos_token": end}
        file.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}, indent=2) + "\n")


def end_token(folder: Path) -> tuple[str, int] | tuple[None, None]:
    """The token that ends a text, by the folder's tokenizer.json, and its id."""
    path = folder / "tokenizer.json"
    added = json.loads(path.read_text()).get("added_tokens", []) if path.is_file() else []
    ids = {token["content"]: token["id"] for token in added}
    return next(((token, ids[token]) for token in END_TOKENS if token in ids), (None, None))


def _kind(link: Link, stored: dict[str, Tensor], arguments: argparse.Namespace) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensor that `link` makes."""
    value = stored[link.ours]
    dtype = chosen_dtype(link.ours, value.dtype, arguments.dtype, arguments.router_dtype)
    return tuple(link.to_hf(value).shape), dtype
