"""Initial values by open_lm's rules, the same for every layout: each block of rows of a matrix has its own generator.

A rank that holds some rows of a matrix makes the blocks that these touch and never holds more than one block beyond its
share. Values are made on the CPU, so that devices agree too.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from openlm_moe.layers.init import truncated_normal

ROWS_PER_BLOCK = 1024
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SECOND_MATRICES = ("feed_forward.w3.weight", "feed_forward.2.weight", "feed_forward.down_proj.weight")


def initial_std(name: str, shape: tuple[int, ...], dim: int) -> float:
    """Deviation of the truncated normal (cut at 3 deviations) for the matrix `name` of a model of width `dim`.

    1/sqrt(fan_in); in block l, attention's output and the feed-forward's second matrix also over sqrt(2 * (l + 1))
    (arXiv 1908.11365).
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return 1 / math.sqrt(dim)
    depth = math.sqrt(2 * (int(match[1]) + 1))
    if match[2] == "attention.out_proj.weight":
        return 1 / math.sqrt(dim) / depth
    return 1 / math.sqrt(shape[1]) / depth if match[2] in _SECOND_MATRICES else 1 / math.sqrt(shape[1])


@torch.no_grad()
def initialise(parameter: nn.Parameter, name: str, dim: int, seed: int) -> None:
    """Fills one parameter, or this rank's share of a sharded one: matrices at random, gains with 1, biases with 0."""
    if parameter.dim() == 1:
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        return
    shape, offset = tuple(parameter.shape), (0, 0)
    local: Tensor = parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    std = initial_std(name, shape, dim)
    first, last = offset[0], offset[0] + local.shape[0]
    columns = slice(offset[1], offset[1] + local.shape[1])
    for start in range(first - first % ROWS_PER_BLOCK, last if local.numel() else 0, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, shape[0])
        block = truncated_normal((stop - start, shape[1]), std, seed, name, start)
        low, high = max(start, first), min(stop, last)
        local[low - first : high - first].copy_(block[low - start : high - start, columns])
