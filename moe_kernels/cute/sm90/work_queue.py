"""How a cluster gets its units of work: by claiming the next number from a counter in memory, or every so many numbers.

Warp 0 of the cluster's first block does nothing else, so that what it waits for (a claim's answer, the search for the
unit) keeps no load waiting. It claims a number, finds its unit (the kernel's order: common/scheduler.py,
common/longest_first.py) and writes it into a slot of both blocks' shared memory, where every other warp reads it. It
goes on when all have read the unit that had the next slot: what a cluster has claimed no other can take, so the slots
are few. A cluster that starts late, because another kernel holds its place, finds fewer units left, or none. Which
cluster computes a unit depends on time; what it computes does not, so results repeat bit for bit.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import AtomicOpKind, atomicrmw
from cutlass.pipeline import Agent, CooperativeGroup, MbarrierArray, PipelineOp

from moe_kernels.cute.common.scheduler import CLUSTER, Work
from moe_kernels.cute.sm90.block import LOADER_WARP

FIELDS = 4  # numbers that tell a block its part of a unit, the expert first: one remote store


class QueueState(NamedTuple):
    """What one thread needs of the queue; nothing in it changes."""

    offsets_E1: cute.Tensor
    counter: cute.Tensor  # (1,), zero before and after the launch
    slots: cute.Tensor  # (fields, slots)
    posted: Any  # a barrier for each slot, in each block
    read: Any  # the same, used in the cluster's first block


class Posting(NamedTuple):
    """What the warp that posts carries along."""

    cursor: Any  # of the order
    number: Int32  # the last one claimed


def slots_for(k_tiles: int) -> int:
    """Return how many units of ``k_tiles`` stages may be posted and not yet read by all: a power of two.

    Claim and search take as long as a few stages, and the units of the slots together must outlast them.
    """
    return 2 if k_tiles >= 12 else 4 if k_tiles >= 4 else 8


class WorkQueue:
    """The units of ``order``, claimed or, without ``claims``, dealt by number.

    ``place`` turns a unit into the four numbers that the block of a rank is told. ``readers`` warps of a block, warp 0
    not among them, read every unit.
    """

    def __init__(
        self, *, order: Any, place: Callable[[Work, Int32], tuple], claims: bool, readers: int, slots: int
    ) -> None:
        assert slots & (slots - 1) == 0
        self.order, self.place, self.claims, self.readers, self.num_slots = order, place, claims, readers, slots

    def storage(self) -> tuple[Any, Any]:
        """Return the types of the slots and of their barriers in shared memory."""
        slots = cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * self.num_slots], 16]
        return slots, cute.struct.MemRange[Int64, 2 * self.num_slots]

    @cute.jit
    def start(self, offsets_E1, counter, storage):
        """Return the state, with the barriers initialised; the cluster must still be synchronised."""
        slots, barriers = self.num_slots, storage.work_barriers.data_ptr()
        poster = CooperativeGroup(Agent.Thread, 1)
        readers = CooperativeGroup(Agent.Thread, (self.readers + 1) * CLUSTER)
        posted = MbarrierArray(barriers, slots, (PipelineOp.AsyncThread, poster))
        read = MbarrierArray(barriers + slots, slots, (PipelineOp.AsyncThread, readers))
        return QueueState(
            offsets_E1, counter, storage.work_slots.get_tensor(cute.make_layout((FIELDS, slots))), posted, read
        )

    @cute.jit
    def expect(self, state):
        """Make every slot ready for its first unit. One warp of a block calls it, the one that reads as LOADER_WARP."""
        if cute.arch.lane_idx() == 0:
            for slot in cutlass.range_constexpr(self.num_slots):
                self._expect(state, slot)

    @cute.jit
    def start_posting(self, state):
        """Return what ``post`` needs. All of warp 0 calls this and ``post``, in the cluster's first block."""
        _, cluster, _ = cute.arch.block_idx()
        _, num_clusters, _ = cute.arch.grid_dim()
        return Posting(self.order.start(state.offsets_E1), cluster - num_clusters)

    @cute.jit
    def post(self, state, posting, turn):
        """Claim a unit and tell both blocks that it is the cluster's ``turn``-th, as soon as there is a slot for it."""
        slot, parity = self._slot(turn)
        state.read.wait(slot, parity ^ 1)
        number = self._claim(state, posting.number)
        work, cursor = self.order.find(cute.arch.shuffle_sync(number, 0), posting.cursor, state.offsets_E1)
        if work.expert < 0:
            self._reset_after_last(state, cursor, number)
        lane = cute.arch.lane_idx()
        if lane < CLUSTER:
            place = state.slots.iterator + cute.assume(slot * FIELDS, divby=FIELDS)
            cute.arch.store_async_dsmem(place, self.place(work, lane), state.posted.get_barrier(slot), lane)
        return Posting(cursor, number)

    @cute.jit
    def _claim(self, state, number):
        """Return the number that follows the cluster's last, ``number``, in the warp's first lane."""
        if const_expr(self.claims):
            if cute.arch.lane_idx() == 0:
                number = _count(state.counter.iterator)
        else:
            _, num_clusters, _ = cute.arch.grid_dim()
            number += num_clusters
        return number

    @cute.jit
    def _reset_after_last(self, state, cursor, number):
        """Leave the counter as it was, if ``number`` was the launch's last claim; ``cursor`` is behind all units.

        Every cluster claims once for each unit that it computes, and once more.
        """
        if const_expr(self.claims):
            _, num_clusters, _ = cute.arch.grid_dim()
            if cute.arch.lane_idx() == 0 and number == cursor.before + num_clusters - 1:
                state.counter[0] = Int32(0)

    @cute.jit
    def read(self, state, turn, warp):
        """Return the block's part of the cluster's ``turn``-th unit, an expert of -1 if there is none.

        Each reading warp, and warp 0 of either block, asks for every turn once, until there is none.
        """
        slot, parity = self._slot(turn)
        state.posted.wait(slot, parity)
        fields = [cute.arch.make_warp_uniform(state.slots[i, slot]) for i in range(FIELDS)]
        cute.arch.sync_warp()  # all lanes have read
        if cute.arch.lane_idx() == 0:
            if warp == LOADER_WARP:  # before its arrival, without which nothing is posted there again
                self._expect(state, slot)
            # Of the default scope, as stages are given back: at the cluster's it becomes a fence that waits for every
            # copy that the warp has in flight. Nothing written is handed over, only the slot, whose value was read.
            cute.arch.mbarrier_arrive(state.read.get_barrier(slot), 0)
        return tuple(fields)

    def _slot(self, turn):
        """Return the slot of a turn and the parity with which it is posted."""
        bits = self.num_slots.bit_length() - 1
        return turn & (self.num_slots - 1), (turn >> bits) & 1

    def _expect(self, state, slot):
        cute.arch.mbarrier_arrive_and_expect_tx(state.posted.get_barrier(slot), 4 * FIELDS)


def _count(counter):
    """Add one and return what was there before. Not by atomic_add: ptxas gathers a warp's additions, and waits."""
    limit = Int32(2**31 - 1)  # where it would start again from 0
    return Int32(atomicrmw(AtomicOpKind.INC, counter.to_llvm_ptr(), limit.ir_value()))
