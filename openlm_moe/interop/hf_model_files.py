"""Weights of a Hugging Face folder into a model that is spread over ranks, and back into such a folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openlm_moe.errors import UserError, writing
from openlm_moe.interop.hf_experts import NAME
from openlm_moe.interop.hf_model import HFModel, build_on_meta
from openlm_moe.layers.init import local_part
from openlm_moe.parallel.state import full_tensor

# What stands beside weights and config in a model's folder, and is carried along as it is.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
log = logging.getLogger(__name__)


def load(folder: Path, config: Any) -> nn.Module:
    """The folder's model on the CPU in fp32, with our experts. Raises `UserError` unless it holds every weight."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                experts_implementation=NAME,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are told below
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the weights of {folder} cannot be read: {str(error).splitlines()[0]}") from None
    for kind, what in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        if names := sorted(map(str, found[kind])):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"the weights of {folder} {what} {names[0]}{more}; they are not of this config.json")
    if names := sorted(found["unexpected_keys"]):
        log.warning("%s holds %d tensors that its model does not use, such as %s", folder, len(names), names[0])
    return model


@torch.no_grad()
def fill(model: HFModel, source: nn.Module | None, device: torch.device, cpu_offload: bool = False) -> None:
    """Gives `model`, on the meta device and sharded, storage and the values of rank 0's `source` (a whole model).

    Every rank calls it. One tensor at a time is whole on `device`; only rank 0 ever holds the whole model.
    cpu_offload: parameters stay on the CPU.
    """
    shared = _shared_parameters(model)
    model.to_empty(device=torch.device("cpu") if cpu_offload else device)
    for (owner, name), others in shared:
        for module, other in others:
            setattr(module, other, getattr(owner, name))
    if cpu_offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    values = None if source is None else dict(_tensors(source))
    for name, target in _tensors(model.model):
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if values is not None:
            whole.copy_(values[name])
        dist.broadcast(whole, 0)
        mine, place = local_part(target)
        mine.copy_(whole[place])


def gather(model: HFModel) -> dict[str, Tensor] | None:
    """Every weight, whole and on the CPU, on rank 0; None on the others. Every rank calls it."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    out: dict[str, Tensor] = {}
    for name, value in model.model.state_dict().items():
        whole = full_tensor(value.detach())
        if main:
            out[name] = whole.cpu()
    return out if main else None


def write(state: dict[str, Tensor], folder: Path, config: Any, origin: Path) -> None:
    """A Hugging Face folder of the weights `state`: safetensors, config, and what else `origin` has beside weights.

    It replaces what is there when it is complete. The weights are fp32, as they were
    trained, so that the folder's model computes what the trained one does.
    """
    with complete_folder(folder, replace=True) as aside:
        with quiet():
            build_on_meta(config).save_pretrained(aside, state_dict=state)
        carry([origin], aside)


@contextmanager
def complete_folder(output: Path, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when all went well, and is removed otherwise.

    Unless it may `replace` it, raises `UserError` where `output` exists with anything in it.
    """
    if not replace and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already; name another folder")
    aside = output.with_name(f".writing-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(output):
            aside.mkdir(parents=True)
            yield aside
            if replace:
                shutil.rmtree(output, ignore_errors=True)
            elif output.exists():
                output.rmdir()  # it is empty
            aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def carry(places: Iterable[Path], output: Path) -> Path | None:
    """Copies the tokenizer's and the like's files of the first of `places` that has any; returns that place."""
    for place in places:
        names = [name for name in CARRIED if (place / name).is_file()]
        for name in names:
            shutil.copyfile(place / name, output / name)
        if names:
            return place
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports; errors are told by exceptions."""
    from transformers.utils import logging as theirs

    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


def tokenizer_vocabulary(folder: Path) -> int | None:
    """How many ids the folder's tokenizer.json has; None where that cannot be told."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True) if path.is_file() else None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once, then buffers, those that no checkpoint keeps included."""
    yield from model.named_parameters()
    yield from model.named_buffers()


Place = tuple[nn.Module, str]


def _shared_parameters(model: nn.Module) -> list[tuple[Place, list[Place]]]:
    """Where each parameter that several modules hold is: its first place, and the others."""
    places: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    return [(first, others) for first, *others in places.values() if others]
