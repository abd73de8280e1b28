"""Which tile a cluster of two CTAs computes next, from the experts' offsets alone: no table, no prefix sum in memory.

Rows are cut into row tiles per expert. A pair of row tiles is one unit of work for each column tile: both CTAs need the
same weights, so one load serves the two. An expert with an odd number of row tiles leaves one over; there the two CTAs
take the same rows and neighbouring column tiles, so that no CTA computes a tile of padding. Units are numbered expert
by expert; within an expert, columns run fastest. Shapes of tiles: tiles.py.
"""
# mypy: disable-error-code="import-not-found"

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

CLUSTER = 2
_WARP = 32


class TilePlace(NamedTuple):
    """Where a unit lies within its expert, for one of the two CTAs."""

    row_tile: Int32
    column: Int32
    is_alone: Boolean  # the two CTAs share rows and not weights


class RowTile(NamedTuple):
    """One CTA's tile, or none if ``is_found`` is false; with the window in which the search for the next one starts."""

    is_found: Boolean
    expert: Int32
    column: Int32
    first_row: Int32
    end_row: Int32  # end of the expert's rows, which may lie inside or beyond the tile
    is_alone: Boolean
    window_expert: Int32
    window_unit: Int32


@cute.jit
def units_of(rows: Int32, columns: cutlass.Constexpr, tile_rows: cutlass.Constexpr) -> Int32:
    """Return how many units an expert's rows make, where the output is ``columns`` column tiles wide."""
    tiles = (rows + (tile_rows - 1)) // tile_rows
    return (tiles // 2) * columns + (tiles % 2) * ((columns + 1) // 2)


@cute.jit
def place_unit(
    unit: Int32, rows: Int32, rank: Int32, columns: cutlass.Constexpr, tile_rows: cutlass.Constexpr
) -> TilePlace:
    """Return where ``unit`` (counted from the expert's first) lies for the CTA ``rank``.

    The column may be one past the last: such a tile lies outside of every tensor, and its stores are clipped away.
    """
    tiles = (rows + (tile_rows - 1)) // tile_rows
    paired = (tiles // 2) * columns
    is_alone = unit >= paired
    pair = unit // columns
    row_tile = 2 * pair + rank
    column = unit - pair * columns
    if is_alone:
        row_tile = tiles - 1
        column = 2 * (unit - paired) + rank
    return TilePlace(row_tile, column, is_alone)


@cute.jit
def find_row_tile(
    unit: Int32,
    window_expert: Int32,
    window_unit: Int32,
    offsets: cute.Tensor,
    rank: Int32,
    columns: cutlass.Constexpr,
    tile_rows: cutlass.Constexpr,
) -> RowTile:
    """Return the tile of ``unit`` for the CTA ``rank``. All lanes of a warp call it and get the same answer.

    Each lane counts the units of one expert, 32 experts at a time. The search starts at the expert ``window_expert``,
    whose first unit is ``window_unit``; units asked for must not fall below it.
    """
    lane = cute.arch.lane_idx()
    num_experts = offsets.shape[0] - 1
    start, end, last = Int32(0), Int32(0), Int32(0)
    searching = Boolean(True)
    while searching:
        expert = window_expert + lane
        start = offsets[cutlass.min(expert, num_experts)]
        end = offsets[cutlass.min(expert + 1, num_experts)]
        last = window_unit + _sum_to_lane(units_of(end - start, columns, tile_rows), lane)
        window_end = cute.arch.shuffle_sync(last, _WARP - 1)
        searching = window_end <= unit and window_expert + _WARP < num_experts
        if searching:
            window_expert += _WARP
            window_unit = window_end
    before = cute.arch.popc(cute.arch.vote_ballot_sync(last <= unit))
    is_found = before < _WARP
    owner = cutlass.min(before, _WARP - 1)
    start = cute.arch.shuffle_sync(start, owner)
    end = cute.arch.shuffle_sync(end, owner)
    first = cute.arch.shuffle_sync(last, owner) - units_of(end - start, columns, tile_rows)
    place = place_unit(unit - first, end - start, rank, columns, tile_rows)
    uniform = cute.arch.make_warp_uniform
    return RowTile(
        is_found,
        uniform(window_expert + owner),
        uniform(place.column),
        uniform(start + place.row_tile * tile_rows),
        uniform(end),
        place.is_alone,
        window_expert,
        window_unit,
    )


@cute.jit
def _sum_to_lane(value: Int32, lane: Int32) -> Int32:
    """Return the sum of ``value`` over the lanes up to and including this one."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += below
    return value
