"""The map from row tiles to groups, made on the device once per routing, so that no GEMM waits for the host.

The number of row tiles depends on the routing, so a section of the map has room for the most there can be. A section,
for one `block_m`, is an entry (number of tiles, 0, 0, 0), then an entry (group, first row, end of the group's rows, 0)
a tile. Rows past the last offset form a group of their own, -1. `tile_map` has one section for each of `ROW_BLOCKS`, so
that every GEMM of a layer finds its own. Shape letters: M rows, E groups, U entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from openlm_moe_kernels.gpu.launch import launch
from openlm_moe_kernels.gpu.tables import ROW_BLOCKS


@triton.jit
def _most_tiles(num_rows, num_groups, block_m):
    """Each of the groups and the tail can end with a tile that has a single row."""
    return (num_rows + (num_groups + 1) * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["num_rows"])
def _tile_map(
    offsets, tiles, num_rows, num_groups, SMALLEST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_U: tl.constexpr
):
    section = tl.program_id(1)
    block_m = SMALLEST << section
    base = tiles
    for earlier in range(section):
        base += 4 * (1 + _most_tiles(num_rows, num_groups, SMALLEST << earlier))

    group = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + group, mask=group < num_groups, other=0)
    ends = tl.where(group < num_groups, ends, num_rows)
    starts = tl.load(offsets + group - 1, mask=(group > 0) & (group <= num_groups), other=0)
    starts = tl.where(group <= num_groups, starts, num_rows)
    counts = (ends - starts + block_m - 1) // block_m
    tile_ends = tl.cumsum(counts, 0)
    num_tiles = tl.sum(counts, 0)

    tile = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    owned = group[None, :] == owner[:, None]
    first_tile = tl.sum(tl.where(owned, (tile_ends - counts)[None, :], 0), 1)
    start = tl.sum(tl.where(owned, starts[None, :], 0), 1)
    end = tl.sum(tl.where(owned, ends[None, :], 0), 1)

    entry = base + 4 * (1 + tile)
    live = tile < num_tiles
    room = tile < _most_tiles(num_rows, num_groups, block_m)
    tl.store(entry, tl.where(live & (owner < num_groups), owner, -1), mask=room)
    tl.store(entry + 1, tl.where(live, start + (tile - first_tile) * block_m, num_rows), mask=room)
    tl.store(entry + 2, tl.where(live, end, num_rows), mask=room)
    tl.store(entry + 3, tl.zeros_like(tile), mask=room)
    if tl.program_id(0) == 0:
        tl.store(base + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, num_tiles, 0))


def most_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Upper bound of the number of row tiles, whatever the group sizes."""
    return (num_rows + (num_groups + 1) * (block_m - 1)) // block_m


def tile_map_shape(num_rows: int, num_experts: int) -> tuple[int, int]:
    return sum(1 + most_tiles(num_rows, num_experts, block) for block in ROW_BLOCKS), 4


def tile_map(offsets_E: Tensor, num_rows: int) -> Tensor:
    """offsets int32 (E,) -> map int32 (U, 4) with a section for each of `ROW_BLOCKS`, in one launch."""
    num_groups = offsets_E.shape[0]
    tiles = offsets_E.new_empty(tile_map_shape(num_rows, num_groups))
    block_e = triton.next_power_of_2(num_groups + 1)
    block_u = max(1, 4096 // block_e)
    launch(
        _tile_map,
        (triton.cdiv(max(1, most_tiles(num_rows, num_groups, ROW_BLOCKS[0])), block_u), len(ROW_BLOCKS)),
        offsets_E.device,
        offsets=offsets_E,
        tiles=tiles,
        num_rows=num_rows,
        num_groups=num_groups,
        SMALLEST=ROW_BLOCKS[0],
        BLOCK_E=block_e,
        BLOCK_U=block_u,
    )
    return tiles


def section(tiles: Tensor, num_rows: int, num_groups: int, block_m: int) -> Tensor:
    """The part of a tile map that is for `block_m`."""
    start = sum(1 + most_tiles(num_rows, num_groups, block) for block in ROW_BLOCKS if block < block_m)
    return tiles[start : start + 1 + most_tiles(num_rows, num_groups, block_m)]
