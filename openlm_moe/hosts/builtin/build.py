"""Makes the model that the flags describe: on the meta device, spread over the ranks, then filled."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from openlm_moe import MoEConfig, MoELayer
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import Layout, check_plan, materialise, parallelize


def build_model(params: ModelParams, moe: MoEConfig, args: argparse.Namespace, layout: Layout) -> nn.Module:
    """The model with initial values, in training mode. Values depend on --seed alone."""
    with torch.device("meta"):
        model = Transformer(params, moe)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(args.grad_checkpointing_scope)
    if args.torchcompile:
        compile_dense_blocks(model)
    spread(model, args, layout)
    materialise(model, layout, args.seed, cpu_offload=args.fsdp_cpu_offload).train()
    if layout.dense_mesh is not None:
        check_plan(model)
    return model


def spread(model: nn.Module, args: argparse.Namespace, layout: Layout, **how: Any) -> None:
    """Shards or replicates `model`, in place, as the flags say; `how` goes to `apply_fsdp`."""
    if args.fsdp:
        how |= {
            "precision": fsdp_precision(args),
            "cpu_offload": args.fsdp_cpu_offload,
            "reshard_after_forward": not args.fsdp_hybrid_o2,
        }
    parallelize(model, layout, **how)


def fsdp_precision(args: argparse.Namespace) -> str:
    """What FSDP computes parameters and reduces gradients in, as `apply_fsdp` names it."""
    return "amp" if args.fsdp_amp else "pure_bf16" if args.fsdp_pure_bf16 else "fp32"


def compile_dense_blocks(model: Transformer) -> None:
    """Compiles every block without a MoE layer in place, one by one. Names of parameters stay as they are.

    A MoE layer routes to sizes that are known only when it runs; its kernels are compiled already.
    """
    for block in model.layers:
        if not isinstance(block.feed_forward, MoELayer):
            block.compile()
