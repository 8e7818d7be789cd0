"""A Hugging Face folder to a checkpoint of ours: a Mixtral, or what `openlm-to-hf` wrote. On the CPU, layer by layer.

The output is a folder with step_0000000 (for --pretrained), model.json (for --model), and what the folder had beside
its weights, such as the tokenizer. It appears when it is complete, or not at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from openlm_moe import MoEConfig, __version__
from openlm_moe.convert import hf_custom, hf_mixtral
from openlm_moe.convert.hf_folder import Weights, read_config
from openlm_moe.convert.hf_links import (
    Link,
    add_dtype_arguments,
    assemble,
    by_ours,
    check_links,
    chosen_dtype,
    independent,
    our_tensors,
)
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.interop.hf_model_files import carry, complete_folder
from openlm_moe.parallel.checkpoint import Checkpointer

MODEL_FILE = "model.json"
# Settings of MoEConfig that a model is made of; the others are how it is trained.
_MODEL_SETTINGS = ("num_experts", "top_k", "every", "layers", "moe_type", "ffn", "ffn_dim", "shared_experts", "score")
_MODEL_SETTINGS += ("normalize_weights",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument("--seq-len", type=int, help="context of the model; default: the folder's")
    add_dtype_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Converts, and says what was written."""
    config = read_config(arguments.folder)
    params, moe = describe(config, arguments.seq_len)
    weights = Weights(arguments.folder)
    ours = our_tensors(params, moe)
    links = find_links(config, params, moe, weights)
    check_links(links, independent(ours, params), weights.shapes, str(arguments.folder))

    parts = by_ours(links)
    if params.weight_tying:
        parts["output.weight"] = parts["tok_embeddings.weight"]
    targets: dict[str, Tensor] = {}
    for name, value in ours.items():
        stored = weights.dtypes[parts[name][0].hf]
        for link in parts[name]:
            stored = torch.promote_types(stored, weights.dtypes[link.hf])
        dtype = chosen_dtype(name, stored, arguments.dtype, arguments.router_dtype)
        targets[name] = torch.empty(value.shape, dtype=dtype, device="meta")

    def make(name: str) -> Tensor:
        return assemble(parts[name], targets[name].shape, targets[name].dtype, weights.read)

    with complete_folder(arguments.output) as aside:
        state = {
            "version": __version__,
            "name": arguments.output.name,
            "step": 0,
            "epoch": 0,
            "model": params.to_json(),
            "moe": moe.to_dict(),
            "hf_config": config,
        }
        writer = Checkpointer(aside, asynchronous=False)
        step = writer.write(0, {"model": targets}, state, MakingPlanner(make)).name
        writer.close()
        (aside / MODEL_FILE).write_text(json.dumps(model_json(params, moe), indent=2) + "\n")
        carry([arguments.folder], aside)
    print(
        f"{arguments.output / step}: {len(targets)} tensors; each of {len(weights.shapes)} tensors used once; train it"
        f" with\n  --model {arguments.output / MODEL_FILE} --pretrained {arguments.output}"
    )


def describe(config: dict[str, Any], seq_len: int | None) -> tuple[ModelParams, MoEConfig]:
    """What a config.json describes, in our words. Raises `UserError` for what the built-in model does not compute."""
    kind = config.get("model_type")
    if kind == hf_custom.MODEL_TYPE:
        return hf_custom.read(config, seq_len)
    if kind != "mixtral":
        raise UserError(f"model_type is {kind!r}; only 'mixtral' and {hf_custom.MODEL_TYPE!r} can be converted")
    return hf_mixtral.read(config, seq_len)


def find_links(config: dict[str, Any], params: ModelParams, moe: MoEConfig, weights: Weights) -> list[Link]:
    """The links between the model's tensors and the folder's, whichever of their names the folder has."""
    if config["model_type"] == hf_custom.MODEL_TYPE:
        return hf_custom.links(params, moe)
    stacked = any(name.endswith(hf_mixtral.STACKED) for name in weights.shapes)
    return hf_mixtral.links(params, moe, stacked)


def model_json(params: ModelParams, moe: MoEConfig) -> dict[str, Any]:
    """The model with its MoE layers in the schema of --model."""
    settings = moe.to_dict()
    shape = {f"moe_{name}".replace("moe_moe_", "moe_"): settings[name] for name in _MODEL_SETTINGS}
    if moe.balance == "bias":  # a buffer of the router
        shape["moe_balance"] = moe.balance
    return params.to_json() | {key: value for key, value in shape.items() if value is not None}


class MakingPlanner(DefaultSavePlanner):
    """Makes each tensor when it is written, so that one is held at a time. `make` gets its name without `model.`"""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        return self._make(write_item.index.fqn.removeprefix("model."))
