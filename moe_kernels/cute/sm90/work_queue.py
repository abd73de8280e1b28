"""How a cluster gets its units of work: from a counter in memory, longest experts first, or by number with a stride.

With the counter, one warp of the cluster's first block claims a unit shortly before the last one's loads are issued,
finds it (common/longest_first.py) and writes it into a slot of both blocks' shared memory, where every warp reads it.
A claim is late on purpose: a cluster that is busy with a long unit must not hold another one back. Which cluster
computes a unit depends on time; what it computes does not, so results repeat bit for bit.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.pipeline import Agent, CooperativeGroup, MbarrierArray, PipelineOp

from moe_kernels.cute.common.longest_first import Cursor, Work, find_work, start_cursor
from moe_kernels.cute.common.scheduler import CLUSTER
from moe_kernels.cute.tiles import TILE_DEPTH

_SLOT_BITS = 2
SLOTS = 1 << _SLOT_BITS  # units that may be posted and not yet read by all
_FIELDS = len(Work._fields)
_WARPS = 12


class QueueState(NamedTuple):
    """What one thread needs of the queue; nothing in it changes."""

    offsets_E1: cute.Tensor
    counter: cute.Tensor  # (1,), zero before and after the launch
    slots: cute.Tensor  # (fields, SLOTS)
    posted: Any  # a barrier for each slot, in each block
    read: Any  # the same, used in the cluster's first block


class WorkQueue:
    """The order of units of a kernel in which every expert makes ``units`` units."""

    def __init__(self, *, units: int, longest_first: bool, skips_empty: bool) -> None:
        self.units, self.longest_first, self.skips_empty = units, longest_first, skips_empty

    def storage(self) -> tuple[Any, Any]:
        """Return the types of the slots and of their barriers in shared memory."""
        slots = cute.struct.Align[cute.struct.MemRange[Int32, _FIELDS * SLOTS], 16]
        return slots, cute.struct.MemRange[Int64, 2 * SLOTS]

    @cute.jit
    def start(self, offsets_E1, counter, slots, barriers):
        """Return the state, with the barriers initialised; the cluster must still be synchronised."""
        poster = CooperativeGroup(Agent.Thread, 1)
        readers = CooperativeGroup(Agent.Thread, _WARPS * CLUSTER)
        posted = MbarrierArray(barriers, SLOTS, (PipelineOp.AsyncThread, poster))
        read = MbarrierArray(barriers + SLOTS, SLOTS, (PipelineOp.AsyncThread, readers))
        return QueueState(offsets_E1, counter, slots, posted, read)

    @cute.jit
    def start_posting(self, state, cluster, warp, rank):
        """Post the cluster's first unit. The warps that load call it.

        Returns what the warp that posts needs later: a cursor, and the number of all units.
        """
        cursor, num_units = Cursor(Int32(0), Int32(0), Int32(0), Int32(0)), Int32(0)
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                for slot in cutlass.range_constexpr(SLOTS):
                    self._expect(state, slot)
            if rank == 0:
                cursor, num_units = start_cursor(state.offsets_E1, self.units, TILE_DEPTH, self.skips_empty)
                cursor = self.post(state, cursor, cluster, Int32(0))
        return cursor, num_units

    @cute.jit
    def claim(self, state, num_units, num_clusters):
        """Return the number of the next unit that no cluster has, in the first lane of the warp that posts.

        Each unit is followed by one claim, so the launch's last claim is known, and leaves the counter as it was.
        """
        number = num_clusters  # the first units went without a claim
        if cute.arch.lane_idx() == 0:
            claims = cute.arch.atomic_add(state.counter.iterator, Int32(1))
            number += claims
            if claims == num_units - 1:
                state.counter[0] = Int32(0)
        return number

    @cute.jit
    def post(self, state, cursor, number, turn):
        """Tell both blocks that unit ``number`` is the cluster's ``turn``-th; return the cursor behind it."""
        number = cute.arch.shuffle_sync(number, 0)
        work, cursor = find_work(number, cursor, state.offsets_E1, self.units, TILE_DEPTH, self.skips_empty)
        slot, parity = turn & (SLOTS - 1), (turn >> _SLOT_BITS) & 1
        state.read.wait(slot, parity ^ 1)
        lane = cute.arch.lane_idx()
        if lane < CLUSTER:
            place = state.slots.iterator + cute.assume(slot * _FIELDS, divby=_FIELDS)
            cute.arch.store_async_dsmem(place, tuple(work), state.posted.get_barrier(slot), lane)
        return cursor

    def next(self, state, turn, warp):
        """Return the cluster's ``turn``-th unit. Every warp asks for every turn once, in order, until there is none."""
        return self._read(state, turn, warp) if self.longest_first else self._stride(state, turn)

    @cute.jit
    def _read(self, state, turn, warp):
        slot, parity = turn & (SLOTS - 1), (turn >> _SLOT_BITS) & 1
        state.posted.wait(slot, parity)
        fields = [cute.arch.make_warp_uniform(state.slots[i, slot]) for i in range(_FIELDS)]
        cute.arch.sync_warp()  # all lanes have read
        if cute.arch.lane_idx() == 0:
            if warp == 0:  # before its arrival, without which nothing is posted there again
                self._expect(state, slot)
            cute.arch.mbarrier_arrive(state.read.get_barrier(slot), 0, scope=MemScopeKind.CLUSTER)
        return Work(*fields)

    def _expect(self, state, slot):
        cute.arch.mbarrier_arrive_and_expect_tx(state.posted.get_barrier(slot), 4 * _FIELDS)

    @cute.jit
    def _stride(self, state, turn):
        _, cluster, _ = cute.arch.block_idx()
        _, num_clusters, _ = cute.arch.grid_dim()
        number = cluster + turn * num_clusters
        expert = number // self.units
        unit = number - expert * self.units
        first, end = Int32(0), Int32(0)
        if expert < state.offsets_E1.shape[0] - 1:
            first, end = state.offsets_E1[expert], state.offsets_E1[expert + 1]
        else:
            expert = Int32(-1)
        return Work(expert, unit, first, end)
