"""Initial values that do not depend on how a model is laid out over processes.

Every matrix has a generator of its own, keyed by the seed and its place in the model, and is made on the CPU. So any
rank can make exactly its own part, and one process and many agree bitwise.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator that is a function of `seed` and `key` alone."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def truncated_normal(shape: tuple[int, ...], std: float, seed: int, *key: str | int) -> Tensor:
    """fp32 CPU tensor of `shape`, normal with deviation `std`, cut at 3 deviations: open_lm's rule."""
    out = torch.empty(shape)
    return torch.nn.init.trunc_normal_(out, std=std, a=-3 * std, b=3 * std, generator=generator(seed, *key))


def expert_std(matrix: str, dim: int, hidden_dim: int, layer_id: int) -> float:
    """open_lm's dense rule for one expert: 1/sqrt(fan_in), the second matrix also over sqrt(2 * (layer + 1)).

    The fan-in is that of one expert's matrix, never that of the stacked tensor.
    """
    if matrix == "w1":
        return 1 / math.sqrt(dim)
    return 1 / math.sqrt(hidden_dim) / math.sqrt(2 * (layer_id + 1))


def expert_matrix(seed: int, layer_id: int, expert: int, matrix: str, shape: tuple[int, int], std: float) -> Tensor:
    """One expert's initial matrix `w1` or `w2`, fp32 on the CPU; `expert` is its global id."""
    return truncated_normal(shape, std, seed, "layers", layer_id, "experts", matrix, expert)


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This process's part of `parameter`, to be written to, and where in the whole it lies, a slice for each dim."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
