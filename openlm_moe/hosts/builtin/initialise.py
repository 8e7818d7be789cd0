"""Initial values by open_lm's rules, the same for every layout: each block of rows of a matrix has its own generator.

A rank that holds some rows of a matrix makes the blocks that these touch and never holds more than one block beyond its
share. Values are made on the CPU, so that devices agree too.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from openlm_moe.layers.init import local_part, truncated_normal

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
    shape = tuple(parameter.shape)
    std = initial_std(name, shape, dim)
    local, (rows, columns) = local_part(parameter)
    for start in range(rows.start - rows.start % ROWS_PER_BLOCK, rows.stop if local.numel() else 0, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, shape[0])
        block = truncated_normal((stop - start, shape[1]), std, seed, name, start)
        low, high = max(start, rows.start), min(stop, rows.stop)
        local[low - rows.start : high - rows.start].copy_(block[low - start : high - start, columns])
