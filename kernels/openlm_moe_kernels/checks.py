"""Validation in front of every operation: ValueError naming the argument, before anything is launched.

Shapes, dtypes and devices are checked always. The values of indices are read only where reading them waits on nothing,
that is for CPU tensors, and on a GPU when OPENLM_MOE_CHECK=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openlm_moe_kernels.backend import ACTIVATIONS, NAMES
from openlm_moe_kernels.plan import RoutePlan

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def require(holds: bool, name: str, problem: Callable[[], str]) -> None:
    """`problem` is called for its text only where it is raised: under torch.compile, text would fix symbolic sizes."""
    if not holds:
        raise ValueError(f"{name} {problem()}")


def matrix(name: str, t: Tensor, dims: int) -> None:
    """A floating-point tensor of so many dimensions, without a tangent, which the operators would lose."""
    require(isinstance(t, Tensor), name, lambda: f"is a {type(t).__name__}; expected a tensor")
    require(t.dim() == dims, name, lambda: f"has shape {tuple(t.shape)}; expected {dims} dimensions")
    require(t.dtype in FLOATS, name, lambda: f"has dtype {t.dtype}; expected one of {', '.join(map(str, FLOATS))}")
    # An operator without a forward-mode formula answers with a tangent of zero (torch 2.13), not with an error.
    traced = forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
    require(not traced, name, lambda: "has a forward-mode tangent (torch.func.jvp); gradients are backward-mode only")


def shape(name: str, t: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    require(tuple(t.shape) == expected, name, lambda: f"has shape {tuple(t.shape)}; expected {meaning} = {expected}")


def like(name: str, t: Tensor, x_name: str, x: Tensor) -> None:
    """The same dtype and device as `x`."""
    require(t.dtype == x.dtype, name, lambda: f"has dtype {t.dtype}, but {x_name} has {x.dtype}")
    on_device(name, t, x_name, x)


def on_device(name: str, t: Tensor, x_name: str, x: Tensor) -> None:
    require(t.device == x.device, name, lambda: f"is on {t.device}, but {x_name} is on {x.device}")


def per_row(name: str, t: Tensor, rows: int, x_name: str, x: Tensor) -> None:
    """A floating-point vector with a value a row."""
    matrix(name, t, 1)
    shape(name, t, (rows,), "one value a row")
    on_device(name, t, x_name, x)


def offsets(t: Tensor, groups: int | None, x_name: str, x: Tensor) -> None:
    """Cumulative ends of so many groups, of any number but none where `groups` is None."""
    require(isinstance(t, Tensor), "offsets", lambda: f"is a {type(t).__name__}; expected a tensor")
    require(t.dtype == torch.int32, "offsets", lambda: f"has dtype {t.dtype}; expected torch.int32")
    require(t.dim() == 1, "offsets", lambda: f"has shape {tuple(t.shape)}; expected one end a group (E,)")
    if groups is not None:
        shape("offsets", t, (groups,), "one end a group (E,)")
    require(t.shape[0] > 0, "offsets", lambda: "has no group; expected at least one")
    on_device("offsets", t, x_name, x)


def gather(t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    require(t.dtype == torch.int64, "gather", lambda: f"has dtype {t.dtype}; expected torch.int64")
    require(t.dim() == 1, "gather", lambda: f"has shape {tuple(t.shape)}; expected one row index a row (M,)")
    on_device("gather", t, "x", x)


def activation(name: str | None, allowed: tuple[str | None, ...] = (None, *ACTIVATIONS)) -> None:
    require(name in allowed, "activation", lambda: f"is {name!r}; it must be one of {', '.join(map(str, allowed))}")


def backend(name: str) -> None:
    require(name in NAMES, "backend", lambda: f"is {name!r}; it must be one of {', '.join(NAMES)}")


def plan(p: RoutePlan, x_name: str, x: Tensor, rows: int | None = None, tokens: int | None = None) -> None:
    """A plan on the device of `x`, for so many rows or tokens."""
    on_device("plan", p.order_N, x_name, x)
    if rows is not None:
        require(p.num_rows == rows, "plan", lambda: f"routes {p.num_rows} rows, but {x_name} has {rows}")
    if tokens is not None:
        require(p.num_tokens == tokens, "plan", lambda: f"routes {p.num_tokens} tokens, but {x_name} has {tokens}")


def readable(t: Tensor) -> bool:
    """Whether values may be read here: on the CPU, or when the user asked for it."""
    return t.device.type == "cpu" or os.environ.get("OPENLM_MOE_CHECK") == "1"


def offset_values(t: Tensor, rows: int) -> None:
    """Cumulative ends: non-decreasing, from 0 to at most the number of rows."""
    if not readable(t):
        return
    values = [0, *t.tolist()]
    falls = [(a, b) for a, b in pairwise(values) if b < a]
    require(not falls, "offsets", lambda: f"falls from {falls[0][0]} to {falls[0][1]}; they are cumulative ends")
    require(values[-1] <= rows, "offsets", lambda: f"ends at {values[-1]}, but there are {rows} rows")


def index_values(name: str, t: Tensor | None, size: int | None) -> None:
    """Row indices: at least 0 and, where `size` is given, below it."""
    if t is None or t.numel() == 0 or not readable(t):
        return
    low, high = (value.item() for value in torch.aminmax(t))
    require(low >= 0, name, lambda: f"holds {low}; it must be 0 or more")
    require(size is None or high < size, name, lambda: f"holds {high}, but there are {size} rows")
