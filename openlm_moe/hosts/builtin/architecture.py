"""What a run trains: the built-in model or a Hugging Face model. `choose` is the one place that tells them apart."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from openlm_moe import LossCollector, MoEConfig, UserError, collect_losses, moe_layers
from openlm_moe.hosts.builtin.build import build_model, spread
from openlm_moe.hosts.builtin.count import count_parameters, flops_per_token
from openlm_moe.hosts.builtin.params import ModelParams, load_model
from openlm_moe.parallel import Layout, check_plan
from openlm_moe.parallel.ranks import on_main

if TYPE_CHECKING:
    from openlm_moe.interop.hf_model import HFDescription


class ParameterTotals(Protocol):
    """Numbers of parameters: all that are trained, and those that one token uses."""

    @property
    def total(self) -> int: ...
    @property
    def active(self) -> int: ...


class Architecture(Protocol):
    """A model's shape, and what the trainer does with one of that shape. Models are tokens, mask -> logits."""

    @property
    def dim(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def moe(self) -> MoEConfig: ...

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint says of the model; see `saving.check_same_model`."""

    def count(self) -> ParameterTotals:
        """Its parameters."""

    def flops_per_token(self) -> float:
        """Active FLOPs of one token in training."""

    def build(self, args: argparse.Namespace, layout: Layout) -> nn.Module:
        """The model with its first weights, spread over the ranks, in training mode. Every rank calls it."""

    @property
    def collect_losses(self) -> Callable[..., AbstractContextManager[LossCollector]]:
        """`openlm_moe.collect_losses` for this kind of model."""

    def layer_ids(self, model: nn.Module) -> dict[str, int]:
        """Name of each MoE layer, as in `LossCollector.per_layer` -> number of its block."""

    def export(self, model: nn.Module, folder: Path, step: int, keep_last: int | None) -> None:
        """Writes the weights of `step` into the run's `folder` for others to read. Every rank calls it."""


def choose(args: argparse.Namespace) -> Architecture:
    """What the flags name. Raises `UserError` for what cannot be built."""
    if args.hf_model is not None:
        return HuggingFace.of(Path(args.hf_model), args.hf_seq_len)
    params, moe = load_model(args.model, vars(args), args.moe)
    moe.moe_layer_ids(params.n_layers)
    return BuiltIn(params, moe)


@dataclass(frozen=True)
class BuiltIn:
    """The built-in `Transformer`. Its checkpoints are its own format; `openlm_moe.convert` makes others of them."""

    params: ModelParams
    moe: MoEConfig

    dim = property(lambda self: self.params.dim)
    seq_len = property(lambda self: self.params.seq_len)
    vocab_size = property(lambda self: self.params.vocab_size)
    collect_losses = property(lambda self: collect_losses)

    def to_json(self) -> dict[str, Any]:
        return self.params.to_json()

    def count(self) -> ParameterTotals:
        return count_parameters(self.params, self.moe)

    def flops_per_token(self) -> float:
        return flops_per_token(self.params, self.moe)

    def build(self, args: argparse.Namespace, layout: Layout) -> nn.Module:
        return build_model(self.params, self.moe, args, layout)

    def layer_ids(self, model: nn.Module) -> dict[str, int]:
        return {name: layer.layer_id for name, layer in moe_layers(model)}

    def export(self, model: nn.Module, folder: Path, step: int, keep_last: int | None) -> None:
        pass


def exported_to(folder: Path, step: int) -> Path:
    """The Hugging Face folder of `step` in a run's folder."""
    return folder / "hf" / f"step_{step:07d}"


@dataclass(frozen=True)
class HuggingFace:
    """A mixture of experts of transformers, with our experts in it. Starts from its folder's weights."""

    described: HFDescription

    dim = property(lambda self: self.described.dim)
    seq_len = property(lambda self: self.described.seq_len)
    vocab_size = property(lambda self: self.described.vocab_size)
    moe = property(lambda self: self.described.moe)

    @classmethod
    def of(cls, folder: Path, seq_len: int | None) -> HuggingFace:
        """The model in `folder`. Raises `UserError`, also where its tokenizer has ids that it has not."""
        from openlm_moe.interop.hf_model import describe
        from openlm_moe.interop.hf_model_files import tokenizer_vocabulary

        described = describe(folder, seq_len)
        ids = tokenizer_vocabulary(folder)
        if ids is not None and ids > described.vocab_size:
            raise UserError(
                f"{folder / 'tokenizer.json'} has {ids} ids, but the model's vocabulary has {described.vocab_size}; "
                "they do not belong together"
            )
        return cls(described)

    @property
    def collect_losses(self) -> Callable[..., AbstractContextManager[LossCollector]]:
        from openlm_moe.interop.hf_model import collect_hf_losses

        return collect_hf_losses

    def to_json(self) -> dict[str, Any]:
        return self.described.to_json()

    def count(self) -> ParameterTotals:
        return self.described.count

    def flops_per_token(self) -> float:
        return self.described.flops_per_token

    def build(self, args: argparse.Namespace, layout: Layout) -> nn.Module:
        """Without a process group, the folder's model itself; else each rank gets its shards from rank 0's copy.

        Each decoder layer is a sharded unit, as are embedding, final norm and head: without expert parallelism no
        all-to-all runs that a unit could enclose.
        """
        from openlm_moe.interop.hf_model import HFModel, build_on_meta
        from openlm_moe.interop.hf_model_files import fill, load

        folder, config = self.described.folder, self.described.config
        source = load(folder, config) if layout.is_main else None
        alone = layout.dense_mesh is None
        model = HFModel(source if alone else build_on_meta(config))
        if args.grad_checkpointing:
            model.set_grad_checkpointing()
        if alone:
            return model.to(layout.device).train()
        spread(model, args, layout, blocks=model.blocks)
        fill(model, source, layout.device, args.fsdp_cpu_offload)
        model.train()
        check_plan(model)
        return model

    def layer_ids(self, model: nn.Module) -> dict[str, int]:
        from openlm_moe.interop.hf_model import layer_ids

        return layer_ids(model)

    def export(self, model: nn.Module, folder: Path, step: int, keep_last: int | None) -> None:
        from openlm_moe.interop.hf_model_files import gather, write

        target = exported_to(folder, step)
        state = gather(model)

        def put() -> None:
            write(state, target, self.described.config, self.described.folder)
            for old in sorted(target.parent.glob("step_*"))[: -keep_last if keep_last else 0]:
                shutil.rmtree(old)

        on_main(put)
