"""How every kernel is launched: on its tensors' device, through one function that tests and compile checks replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton

Grid = tuple[int, ...]
Launcher = Callable[[Any, Grid, torch.device, dict[str, Any]], None]


def _run(kernel: Any, grid: Grid, device: torch.device, arguments: dict[str, Any]) -> None:
    # The current device may be another one than the tensors'; a launch there would read foreign addresses.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments)


_launcher: Launcher = _run


def launch(kernel: Any, grid: Grid, device: torch.device, **arguments: Any) -> None:
    """Launches `kernel` on `device`, or nothing if the grid has no program."""
    if 0 not in grid:
        _launcher(kernel, grid, device, arguments)


@contextmanager
def launcher(wrap: Callable[[Launcher], Launcher]) -> Iterator[None]:
    """Inside, every launch goes through `wrap(the launcher before)`: to count launches, or to compile and not run."""
    global _launcher
    previous, _launcher = _launcher, wrap(_launcher)
    try:
        yield
    finally:
        _launcher = previous


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Decided when triton is imported."""
    return bool(triton.knobs.runtime.interpret)


def persistent_grid(tiles: int, programs_per_sm: int, device: torch.device) -> Grid:
    """One program a tile, or at most `programs_per_sm` on each multiprocessor, which then take several tiles each."""
    if not programs_per_sm:
        return (tiles,)
    # Where there is no GPU (interpreter, meta tensors) a few programs, so that each takes several tiles.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return (min(tiles, programs_per_sm * processors),)


def precision(dtype: torch.dtype, allow_tf32: bool) -> str:
    """`input_precision` of tl.dot. IEEE is always named: left alone, the compiler takes TF32 for float32."""
    return "tf32" if allow_tf32 and dtype == torch.float32 else "ieee"
