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


class Work(NamedTuple):
    """One unit of one expert; ``expert`` is -1 where there is none left."""

    expert: Int32
    unit: Int32  # within the expert
    first_row: Int32
    end_row: Int32


class RowTile(NamedTuple):
    """One CTA's tile of a unit; there is none if ``expert`` is -1."""

    expert: Int32
    column: Int32
    first_row: Int32
    end_row: Int32  # end of the expert's rows, which may lie inside or beyond the tile
    is_alone: Boolean


class RowCursor(NamedTuple):
    """How far a search for a unit is: the 32 experts that it looks at."""

    window: Int32  # the first of them
    before: Int32  # units of the experts before; behind the last expert, all units


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


class ExpertByExpert:
    """The order of the units of an output that is ``columns`` column tiles wide.

    All lanes of a warp call the methods and get the same answer: each counts the units of one expert, 32 at a time.
    """

    def __init__(self, *, columns: int, tile_rows: int) -> None:
        self.columns, self.tile_rows = columns, tile_rows

    def no_cursor(self) -> RowCursor:
        """Return a cursor that stands nowhere."""
        return RowCursor(Int32(0), Int32(0))

    def start(self, offsets_E1: cute.Tensor) -> RowCursor:
        """Return the cursor of the first unit."""
        return RowCursor(Int32(0), Int32(0))

    @cute.jit
    def find(self, number: Int32, cursor: RowCursor, offsets_E1: cute.Tensor) -> tuple[Work, RowCursor]:
        """Return the ``number``-th unit and the cursor behind it. Numbers must be asked for in rising order."""
        num_experts = offsets_E1.shape[0] - 1
        window, before = cursor
        first, end, units, last = Int32(0), Int32(0), Int32(0), Int32(0)
        is_found, searching = Boolean(False), Boolean(True)
        while searching:
            expert = window + cute.arch.lane_idx()
            first = offsets_E1[cutlass.min(expert, num_experts)]
            end = offsets_E1[cutlass.min(expert + 1, num_experts)]
            units = units_of(end - first, self.columns, self.tile_rows)
            last = before + _sum_to_lane(units, cute.arch.lane_idx())
            window_end = cute.arch.shuffle_sync(last, _WARP - 1)
            is_found = number < window_end
            if not is_found:
                window += _WARP
                before = window_end
            searching = not is_found and window < num_experts
        expert, unit = Int32(-1), Int32(0)
        if is_found:
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(last <= number))
            expert, unit = window + owner, number - cute.arch.shuffle_sync(last - units, owner)
            first, end = cute.arch.shuffle_sync(first, owner), cute.arch.shuffle_sync(end, owner)
        return Work(expert, unit, first, end), RowCursor(window, before)


@cute.jit
def _sum_to_lane(value: Int32, lane: Int32) -> Int32:
    """Return the sum of ``value`` over the lanes up to and including this one."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += below
    return value
