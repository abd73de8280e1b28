"""Rows that are read through token_R: their indices, which warp 0 fetches ahead, and who copies what of them.

Three warps copy rows with cp.async. An index that came from memory into a register would keep a warp waiting before the
next barrier (ptxas lets no load be in flight there), so warp 0 copies indices into a ring in shared memory, also with
cp.async, which nothing waits for but the ring's barriers.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from math import gcd
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync
from cutlass.pipeline import Agent, CooperativeGroup, MbarrierArray, PipelineOp

from moe_kernels.cute.common.ring import advance
from moe_kernels.cute.sm90.block import CHUNK, GATHER_WARPS, LOADER_WARP

_WARP = 32
_ATOM = 64  # elements of a 128-byte row of the swizzle, whose 8 chunks change places with the row modulo 8


class TokenState(NamedTuple):
    """The ring as a thread sees it."""

    tokens: cute.Tensor  # (batch, slots)
    full: Any
    empty: Any


class TokenRing:
    """``slots`` batches of the tokens of ``batch`` successive rows."""

    def __init__(self, *, batch: int, slots: int) -> None:
        self.batch, self.slots = batch, slots

    def storage(self) -> tuple[Any, Any]:
        """Return the types of the ring and of its barriers in shared memory."""
        tokens = cute.struct.Align[cute.struct.MemRange[Int32, self.batch * self.slots], 16]
        return tokens, cute.struct.MemRange[Int64, 2 * self.slots]

    @cute.jit
    def start(self, storage):
        """Return the state, with the barriers initialised; the block must still be synchronised."""
        barriers = storage.token_barriers.data_ptr()
        filling = CooperativeGroup(Agent.Thread, _WARP)
        taking = CooperativeGroup(Agent.Thread, GATHER_WARPS)
        return TokenState(
            storage.tokens.get_tensor(cute.make_layout((self.batch, self.slots))),
            MbarrierArray(barriers, self.slots, (PipelineOp.AsyncLoad, filling)),
            MbarrierArray(barriers + self.slots, self.slots, (PipelineOp.AsyncThread, taking)),
        )

    @cute.jit
    def fill(self, state, token_R, first_row, end_row, slot, phase):
        """Fetch the tokens of the rows from ``first_row`` on, as soon as the slot is free. Warp 0.

        Returns the ring's next place.
        """
        state.empty.wait(slot, phase)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.ALWAYS), Int32, num_bits_per_copy=32)
        lane = cute.arch.lane_idx()
        one = cute.make_layout((1,))
        for i in cutlass.range_constexpr(self.batch // _WARP):
            row = first_row + (lane + _WARP * i)
            inside = cute.make_rmem_tensor((1,), Boolean)
            inside[0] = row < end_row
            source = cute.make_tensor(token_R.iterator + row, one)
            target = cute.make_tensor(state.tokens.iterator + (slot * self.batch + lane + _WARP * i), one)
            cute.copy(atom, source, target, pred=inside)
        state.full.arrive(slot, None)
        return advance(slot, phase, self.slots)

    @cute.jit
    def take(self, state, slot, phase, pieces, first_row, base, row_bytes, addresses):
        """Read from the slot where this lane's chunk of each pass of ``pieces`` lies, into ``addresses``.

        ``base`` is the address of the chunk in token 0. Returns the ring's next place. A gathering warp.
        """
        state.full.wait(slot, phase)
        for i in cutlass.range_constexpr(pieces.passes):  # a row past the end has a token that is never used
            row = cutlass.min(first_row + i * pieces.row_step, self.batch - 1)
            addresses[i] = base + Int64(state.tokens[row, slot]) * row_bytes
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            state.empty.arrive(slot, None)
        return advance(slot, phase, self.slots)


class Pieces:
    """``rows`` rows of ``width`` values, cut into pieces of 32 chunks of 16 bytes, which the warps copy in turn.

    In shared memory the values lie in columns of 64, row below row, under the 128-byte swizzle: what the products read
    as K-major where the width is 64, and across the contraction where it is more.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.chunks = rows, width // CHUNK
        self.piece_rows = _WARP // self.chunks
        self.count = rows // self.piece_rows
        self.passes = -(-self.count // GATHER_WARPS)
        self.row_step = GATHER_WARPS * self.piece_rows
        self.period = 8 // gcd(8, self.row_step)  # passes after which the swizzle comes back

    def first_row(self, warp: Int32, lane: Int32) -> Int32:
        """Return the first row that this lane copies from; the others are ``row_step`` apart."""
        return (warp - LOADER_WARP) * self.piece_rows + lane // self.chunks

    def chunk(self, lane: Int32) -> Int32:
        """Return which chunk of its rows this lane copies."""
        return lane % self.chunks

    def place(self, row: Int32, chunk: Int32) -> Int32:
        """Return where a chunk lies within a stage, in elements."""
        column, within = chunk // (_ATOM // CHUNK), chunk % (_ATOM // CHUNK)
        return (column * self.rows + row) * _ATOM + (within ^ (row % 8)) * CHUNK

    def places(self, warp: Int32, lane: Int32) -> list[Int32]:
        """Return where this lane's chunks of a whole period lie; ``offset`` tells the others'."""
        first = self.first_row(warp, lane)
        return [self.place(first + i * self.row_step, self.chunk(lane)) for i in range(self.period)]

    def offset(self, places: list[Int32], i: int) -> Int32:
        """Return where this lane's chunk of pass ``i`` lies."""
        turns, within = divmod(i, self.period)
        return places[within] + turns * self.period * self.row_step * _ATOM

    @cute.jit
    def copy(self, i: cutlass.Constexpr, first_row, address, target, inside):
        """Copy this lane's chunk of pass ``i`` from ``address`` to the pointer ``target``.

        Unless ``inside`` write zeros: they cost neither a read nor, in the tensor cores, the power that repeating a row
        would. In the last pass some warps have no piece.
        """
        if const_expr((i + 1) * GATHER_WARPS <= self.count):  # noqa: SIM114 - decided by the compiler, the other is not
            _copy_chunk(address, target, inside)
        elif first_row + i * self.row_step < self.rows:
            _copy_chunk(address, target, inside)


def _copy_chunk(address, target, inside) -> None:
    dtype = target.dtype
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
    layout = cute.make_layout(((CHUNK, 1),))
    source = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    predicate = cute.make_rmem_tensor((1,), Boolean)
    predicate[0] = inside
    cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout), pred=predicate)
