"""Units of work in the order longest expert first, found by walking over the experts' offsets: nothing is sorted.

An expert makes the same number of units as any other, and each takes as long as its rows are many. Experts go by the
size class of their contraction, a power of two: enough for a greedy assignment to end within a fraction of the last
units' length, and one pass of a warp over the experts for each class that occurs. Numbers must be asked for in rising
order; a Cursor holds where the search stands. Who hands the units out: sm90/work_queue.py.
"""
# mypy: disable-error-code="import-not-found"

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from moe_kernels.cute.common.scheduler import Work

_WARP = 32


class Cursor(NamedTuple):
    """How far the walk is: 32 experts, looked at for one size class."""

    size: Int32  # the class, -1 behind the last
    smaller: Int32  # the largest class below that this pass has met
    window: Int32  # the first of the 32 experts
    before: Int32  # units before this window's; behind the last, all units


class Step(NamedTuple):
    """What one look at a window says."""

    is_found: Boolean
    cursor: Cursor


@cute.jit
def look(number: Int32, cursor: Cursor, members: Int32, smaller: Int32, num_experts: Int32, units: int) -> Step:
    """Return whether unit ``number`` lies in the cursor's window, and where to look next if not.

    ``members`` has a bit for each of the window's experts of the cursor's class; ``smaller`` is the largest class below
    it in the window, or -1.
    """
    size, window, before = cursor.size, cursor.window, cursor.before
    below = cutlass.max(cursor.smaller, smaller)
    window_end = before + cute.arch.popc(members) * units
    is_found = number < window_end
    if not is_found:
        before = window_end
        window += _WARP
        if window >= num_experts:
            size, below, window = below, Int32(-1), Int32(0)
    return Step(is_found, Cursor(size, below, window, before))


@cute.jit
def nth_member(members: Int32, index: Int32) -> Int32:
    """Return the place of the ``index``-th set bit, counted from 0, of a mask that has more than ``index``."""
    place = Int32(0)
    for width in cutlass.range_constexpr(5):
        half = 16 >> width
        low = cute.arch.popc((members >> place) & ((1 << half) - 1))
        if index >= low:
            index -= low
            place += half
    return place


class LongestFirst:
    """The order, where an expert makes ``units`` units whose length is its number of stages of ``depth`` rows.

    Experts without rows come last, or with ``skips_empty`` not at all. All lanes of a warp call the methods.
    """

    def __init__(self, *, units: int, depth: int, skips_empty: bool) -> None:
        self.units, self.depth, self.skips_empty = units, depth, skips_empty

    def no_cursor(self) -> Cursor:
        """Return a cursor that stands nowhere."""
        return Cursor(*[Int32(0)] * 4)

    @cute.jit
    def start(self, offsets_E1: cute.Tensor) -> Cursor:
        """Return the cursor of the first unit."""
        largest = Int32(-1)
        windows = cute.ceil_div(offsets_E1.shape[0] - 1, _WARP)
        for i in cutlass.range(windows, unroll=4):  # several reads in flight: nothing can start before this ends
            _, _, size = _expert(offsets_E1, i * _WARP, self.depth, self.skips_empty)
            largest = cutlass.max(largest, size)
        return Cursor(cute.arch.warp_redux_sync(largest, "max"), Int32(-1), Int32(0), Int32(0))

    @cute.jit
    def find(self, number: Int32, cursor: Cursor, offsets_E1: cute.Tensor) -> tuple[Work, Cursor]:
        """Return the ``number``-th unit and the cursor behind it."""
        num_experts = offsets_E1.shape[0] - 1
        members, first, end = Int32(0), Int32(0), Int32(0)
        is_found = Boolean(False)
        while not is_found and cursor.size >= 0:
            first, end, size = _expert(offsets_E1, cursor.window, self.depth, self.skips_empty)
            members = cute.arch.vote_ballot_sync(size == cursor.size)
            smaller = cute.arch.warp_redux_sync(size if size < cursor.size else Int32(-1), "max")
            is_found, cursor = look(number, cursor, members, smaller, num_experts, self.units)
        expert, unit = Int32(-1), Int32(0)
        if is_found:
            index = (number - cursor.before) // self.units
            owner = nth_member(members, index)
            expert, unit = cursor.window + owner, number - cursor.before - index * self.units
            first, end = cute.arch.shuffle_sync(first, owner), cute.arch.shuffle_sync(end, owner)
        else:
            first, end = Int32(0), Int32(0)
        return Work(expert, unit, first, end), cursor


@cute.jit
def _expert(offsets_E1: cute.Tensor, window: Int32, depth: int, skips_empty: bool) -> tuple[Int32, Int32, Int32]:
    """Return the bounds of the rows of this lane's expert and its size class, -1 past the last and where it is skipped.

    The class is how many bits the number of its stages has.
    """
    num_experts = offsets_E1.shape[0] - 1
    expert = window + cute.arch.lane_idx()
    first = offsets_E1[cutlass.min(expert, num_experts)]
    end = offsets_E1[cutlass.min(expert + 1, num_experts)]
    size = 32 - Int32(cute.arch.clz((end - first + (depth - 1)) // depth))
    is_counted = expert < num_experts
    if cutlass.const_expr(skips_empty):
        is_counted = is_counted and end > first
    return first, end, size if is_counted else Int32(-1)
