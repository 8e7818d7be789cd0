"""AdamW over fp32 master weights."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW in which matrices decay by --wd, and gains and biases do not.

    Every parameter is in exactly one group. Parameters of different device meshes are in different groups, since
    AdamW's fused loops over a group cannot mix them. Raises ValueError for parameters that are not fp32 or fp64: the
    arithmetic of a step may be bf16, what is stepped may not.
    """
    groups: dict[tuple[float, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {parameter.dtype}; the optimizer needs fp32 master weights")
        decay = args.wd if parameter.dim() >= 2 else 0.0
        mesh = str(parameter.device_mesh) if isinstance(parameter, DTensor) else ""
        groups.setdefault((decay, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": members, "weight_decay": decay} for (decay, _), members in groups.items()],
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.eps,
        foreach=True,
    )
