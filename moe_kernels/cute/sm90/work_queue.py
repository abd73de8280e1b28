"""How a cluster gets its units of work: by claiming the next number from a counter in memory, or every so many numbers.

One warp of the cluster's first block claims a number, finds its unit (the kernel's order: common/scheduler.py,
common/longest_first.py) and writes it into a slot of both blocks' shared memory, where every other warp reads it. It
does so some stages ahead, because a claim's answer and the search each take as long as it takes to multiply a few of
them; no further ahead than that, because what a cluster has claimed no other can take. A cluster that starts late,
because another kernel holds its place, finds fewer units left, or none. Which cluster computes a unit depends on time;
what it computes does not, so results repeat bit for bit.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import AtomicOpKind, atomicrmw
from cutlass.pipeline import Agent, CooperativeGroup, MbarrierArray, PipelineOp

from moe_kernels.cute.common.scheduler import CLUSTER, Work

_SLOT_BITS = 3
SLOTS = 1 << _SLOT_BITS  # units that may be posted and not yet read by all
FIELDS = len(Work._fields)


class QueueState(NamedTuple):
    """What one thread needs of the queue; nothing in it changes."""

    offsets_E1: cute.Tensor
    counter: cute.Tensor  # (1,), zero before and after the launch
    slots: cute.Tensor  # (fields, SLOTS)
    posted: Any  # a barrier for each slot, in each block
    read: Any  # the same, used in the cluster's first block


class Lookahead(NamedTuple):
    """When the loads of a unit claim and post later ones: at which stage of it, for the unit so many turns on."""

    claimed_units: int
    claim_at: int
    posted_units: int
    post_at: int
    read_at: int  # the next unit, by warps that must read ahead for it


def lookahead(k_tiles: int) -> Lookahead:
    """Return it for units of ``k_tiles`` stages: claimed 12 stages before they are due, posted 8, read 4.

    Short units are posted two of them ahead at most, so that a slot is free well before it is used again, and claimed
    at most one more, so that a claim's number is used before the next one's.
    """
    post = min(8, 2 * k_tiles)
    claim = min(12, post + k_tiles)
    claimed_units, posted_units = -(-claim // k_tiles), -(-post // k_tiles)
    return Lookahead(
        claimed_units,
        claimed_units * k_tiles - claim,
        posted_units,
        posted_units * k_tiles - post,
        k_tiles - min(4, k_tiles),
    )


class WorkQueue:
    """The units of ``order``, claimed or, without ``claims``, dealt by number.

    Loading a unit claims the one ``claimed_units`` turns on and posts the one ``posted_units`` turns on; ``readers``
    warps of a block read every unit.
    """

    def __init__(
        self, *, order: Any, claims: bool, readers: int, claimed_units: int = 1, posted_units: int = 1
    ) -> None:
        assert posted_units <= claimed_units <= posted_units + 1 < SLOTS
        self.order, self.claims, self.readers = order, claims, readers
        self.claimed_units, self.posted_units = claimed_units, posted_units

    def storage(self) -> tuple[Any, Any]:
        """Return the types of the slots and of their barriers in shared memory."""
        slots = cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * SLOTS], 16]
        return slots, cute.struct.MemRange[Int64, 2 * SLOTS]

    @cute.jit
    def start(self, offsets_E1, counter, slots, barriers):
        """Return the state, with the barriers initialised; the cluster must still be synchronised."""
        poster = CooperativeGroup(Agent.Thread, 1)
        readers = CooperativeGroup(Agent.Thread, self.readers * CLUSTER)
        posted = MbarrierArray(barriers, SLOTS, (PipelineOp.AsyncThread, poster))
        read = MbarrierArray(barriers + SLOTS, SLOTS, (PipelineOp.AsyncThread, readers))
        return QueueState(offsets_E1, counter, slots, posted, read)

    @cute.jit
    def start_posting(self, state, warp, rank):
        """Claim and post the cluster's first units. The warps that load call it.

        Returns what the warp that posts carries along: the order's cursor, and the last number claimed.
        """
        cursor, number = self.order.no_cursor(), Int32(0)
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                for slot in cutlass.range_constexpr(SLOTS):
                    self._expect(state, slot)
            if rank == 0:
                numbers = self._claim_first(state)  # all at once, and on their way while the cursor is found
                cursor = self.order.start(state.offsets_E1)
                for turn in cutlass.range_constexpr(self.posted_units):
                    cursor = self.post(state, cursor, numbers[turn], Int32(turn))
                number = numbers[self.claimed_units - 1]
        return cursor, number

    def _claim_first(self, state) -> list[Int32]:
        _, cluster, _ = cute.arch.block_idx()
        _, num_clusters, _ = cute.arch.grid_dim()
        numbers = [self.claim(state, cluster - num_clusters)]
        while len(numbers) < self.claimed_units:
            numbers.append(self.claim(state, numbers[-1]))
        return numbers

    @cute.jit
    def claim(self, state, number):
        """Return the number that follows the cluster's last, ``number``. In the warp's first lane; used by ``post``.

        Nothing may be done with a claimed number for a while: it is on its way from memory.
        """
        if const_expr(self.claims):
            if cute.arch.lane_idx() == 0:
                number = _count(state.counter.iterator)
        else:
            _, num_clusters, _ = cute.arch.grid_dim()
            number += num_clusters
        return number

    @cute.jit
    def post(self, state, cursor, number, turn):
        """Tell both blocks that unit ``number`` is the cluster's ``turn``-th; return the cursor behind it."""
        work, cursor = self.order.find(cute.arch.shuffle_sync(number, 0), cursor, state.offsets_E1)
        if work.expert < 0:
            self._reset_after_last(state, cursor, number)
        slot, parity = turn & (SLOTS - 1), (turn >> _SLOT_BITS) & 1
        state.read.wait(slot, parity ^ 1)
        lane = cute.arch.lane_idx()
        if lane < CLUSTER:
            place = state.slots.iterator + cute.assume(slot * FIELDS, divby=FIELDS)
            cute.arch.store_async_dsmem(place, tuple(work), state.posted.get_barrier(slot), lane)
        return cursor

    @cute.jit
    def _reset_after_last(self, state, cursor, number):
        """Leave the counter as it was, if ``number`` was the launch's last claim; ``cursor`` is behind all units.

        Every cluster claims once for each unit that it computes, and ``claimed_units`` times more.
        """
        if const_expr(self.claims):
            _, num_clusters, _ = cute.arch.grid_dim()
            if cute.arch.lane_idx() == 0 and number == cursor.before + self.claimed_units * num_clusters - 1:
                state.counter[0] = Int32(0)

    @cute.jit
    def read(self, state, turn, warp):
        """Return the cluster's ``turn``-th unit. Each reading warp asks for every turn once, until there is none."""
        slot, parity = turn & (SLOTS - 1), (turn >> _SLOT_BITS) & 1
        state.posted.wait(slot, parity)
        fields = [cute.arch.make_warp_uniform(state.slots[i, slot]) for i in range(FIELDS)]
        cute.arch.sync_warp()  # all lanes have read
        if cute.arch.lane_idx() == 0:
            if warp == 0:  # before its arrival, without which nothing is posted there again
                self._expect(state, slot)
            # Of the default scope, as stages are given back: at the cluster's it becomes a fence that waits for every
            # copy that the warp has in flight. Nothing written is handed over, only the slot, whose value was read.
            cute.arch.mbarrier_arrive(state.read.get_barrier(slot), 0)
        return Work(*fields)

    @cute.jit
    def end(self, state, cursor, number, turn, warp, rank):
        """Leave nothing on its way: neither a post behind ``turn``, which was read and said that no unit is left,
        nor a claim that was not posted. The warps that load call it.
        """
        if warp == 0:
            for i in cutlass.range_constexpr(1, self.posted_units):
                later = turn + i
                state.posted.wait(later & (SLOTS - 1), (later >> _SLOT_BITS) & 1)
            if const_expr(self.claimed_units > self.posted_units):
                if rank == 0:
                    self._reset_after_last(state, cursor, number)

    def _expect(self, state, slot):
        cute.arch.mbarrier_arrive_and_expect_tx(state.posted.get_barrier(slot), 4 * FIELDS)


def _count(counter):
    """Add one and return what was there before. Not by atomic_add: ptxas gathers a warp's additions, and waits."""
    limit = Int32(2**31 - 1)  # where it would start again from 0
    return Int32(atomicrmw(AtomicOpKind.INC, counter.to_llvm_ptr(), limit.ir_value()))
