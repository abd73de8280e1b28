"""The producer warps of grouped_gemm.py: warp 0 posts units, the others feed the ring with rows and weights.

Rows are gathered by three warps with cp.async (gather.py), or come packed by TMA from one warp; weights come by TMA.
How units are claimed and found is work_queue.py and common/scheduler.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import MbarrierArray

from moe_kernels.cute.common.ring import advance
from moe_kernels.cute.common.scheduler import CLUSTER, ExpertByExpert, RowTile, Work, place_unit
from moe_kernels.cute.common.views import load_origin
from moe_kernels.cute.sm90.block import CHUNK, GATHER_WARPS, LOADER_WARP
from moe_kernels.cute.sm90.epilogue import TmaView
from moe_kernels.cute.sm90.gather import Pieces, TokenRing
from moe_kernels.cute.sm90.work_queue import WorkQueue, slots_for
from moe_kernels.cute.tiles import ELEMENT_BYTES, TILE_DEPTH, KernelForm, TileConfig

_LAST_COLUMN = 255  # of column tiles, as they are written between a row tile and a bit
_ROW_SHIFT = 9


class Operands(NamedTuple):
    """The inputs on the device. ``weights_alone`` loads a block's whole tile of weights, ``weights`` half of it."""

    rows: TmaView
    weights: TmaView
    weights_alone: TmaView
    token_R: cute.Tensor


class SharedTensors(NamedTuple):
    """A: (rows, depth, stages), A_values its memory, which no swizzle moves. B: (columns, depth, stages) for the MMA;
    B_box is the same memory as TMA writes it."""

    A: cute.Tensor
    A_values: cute.Pointer
    B: cute.Tensor
    B_box: cute.Tensor


class Barriers(NamedTuple):
    """One array per hand-over; what a form does not use is None."""

    full: MbarrierArray
    empty: MbarrierArray
    loaded: MbarrierArray | None  # the epilogue's own loads


class Loader:
    """Loads for one form and width; ``tma_bytes`` are what TMA brings of one stage."""

    def __init__(
        self, form: KernelForm, *, contraction: int, column_tiles: int, dtype: type[cutlass.Numeric], tile: TileConfig
    ) -> None:
        self.tile, self.dtype, self.contraction = tile, dtype, contraction
        assert column_tiles < _LAST_COLUMN
        self.column_tiles, self.halves = column_tiles, form.halves
        self.k_tiles = -(-contraction // TILE_DEPTH)
        self.tma_bytes = (tile.columns + (0 if form.gathers else tile.rows)) * TILE_DEPTH * ELEMENT_BYTES
        self.gathers, self.pieces = form.gathers, Pieces(tile.rows, TILE_DEPTH)
        self.tokens = TokenRing(batch=tile.rows, slots=2)
        self.queue = WorkQueue(
            order=ExpertByExpert(columns=column_tiles, tile_rows=tile.rows),
            place=self.place,
            claims=tile.claims_units,
            readers=8 + (GATHER_WARPS if form.gathers else 1),
            slots=slots_for(self.k_tiles),
        )

    def place(self, work: Work, rank: Int32) -> tuple:
        """Return what the block of ``rank`` is told of a unit; ``next_tile`` reads it."""
        at = place_unit(work.unit, work.end_row - work.first_row, rank, self.column_tiles, self.tile.rows)
        place = (at.row_tile << _ROW_SHIFT) + (at.column << 1) + Int32(at.is_alone)
        return work.expert, place, work.first_row, work.end_row

    @cute.jit
    def next_tile(self, queue, turn, warp):
        """Return this block's tile of the cluster's ``turn``-th unit.

        What comes out of shared memory is the same for all lanes, but ptxas only believes it of what is calculated from
        it; of coordinates that it does not believe it of, each TMA instruction becomes a loop over the lanes.
        """
        expert, place, first_row, end_row = self.queue.read(queue, turn, warp)
        column = (place >> 1) & _LAST_COLUMN
        first_row += (place >> _ROW_SHIFT) * self.tile.rows
        return RowTile(expert, column, first_row, end_row, (place & 1) != 0)

    def _partition_weights(self, view, sB_box, tile, rank=0, blocks=1):
        box = (self.tile.columns // self.halves, TILE_DEPTH, *[2] * (self.halves - 1))
        gB = cute.local_tile(view.tensor, box, (tile.column, None, *[0] * (self.halves - 1), tile.expert))
        modes = cute.rank(sB_box) - 1
        sB, gB = cute.group_modes(sB_box, 0, modes), cute.group_modes(gB, 0, modes)
        return cpasync.tma_partition(view.atom, rank, cute.make_layout(blocks), sB, gB)

    @cute.jit
    def _issue_weights(self, operands, shared, tile, k, stage, barrier, rank):
        """Announce a stage's bytes and load its weights: half of them for both blocks, or if alone all."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tma_bytes)
        if tile.is_alone:
            dst, src = self._partition_weights(operands.weights_alone, shared.B_box, tile)
            cute.copy(operands.weights_alone.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier)
        else:
            dst, src = self._partition_weights(operands.weights, shared.B_box, tile, rank, CLUSTER)
            both = Int32((1 << CLUSTER) - 1)
            cute.copy(operands.weights.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier, mcast_mask=both)

    def _partition_rows(self, operands, shared, tile):
        column, row, wrap, end = load_origin(tile.first_row, tile.end_row, self.contraction)
        gA = cute.local_tile(
            cute.domain_offset((row, column, wrap, end), operands.rows.tensor),
            (self.tile.rows, TILE_DEPTH),
            (0, None, 0, 0),
        )
        return cpasync.tma_partition(
            operands.rows.atom, 0, cute.make_layout(1), cute.group_modes(shared.A, 0, 2), cute.group_modes(gA, 0, 2)
        )

    @cute.jit
    def schedule(self, operands, queue, tokens, warp, rank):
        """Post the cluster's units, and fetch the tokens of its rows where they are gathered. Warp 0."""
        turn, slot, phase = Int32(0), Int32(0), Int32(1)
        posting = self.queue.start_posting(queue)
        searching = Boolean(True)
        while searching:
            if rank == 0:
                posting = self.queue.post(queue, posting, turn)
            tile = self.next_tile(queue, turn, warp)
            searching = tile.expert >= 0
            if const_expr(self.gathers):
                if searching:
                    slot, phase = self.tokens.fill(tokens, operands.token_R, tile.first_row, tile.end_row, slot, phase)
            turn += 1

    @cute.jit
    def load(self, operands, queue, shared, barriers, warp, rank):
        """Feed the ring by TMA alone. One warp."""
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        self.queue.expect(queue)
        tile = self.next_tile(queue, turn, warp)
        while tile.expert >= 0:
            dst, src = self._partition_rows(operands, shared, tile)
            for k in cutlass.range(self.k_tiles, unroll=1):
                barriers.empty.wait(stage, phase)
                barrier = barriers.full.get_barrier(stage)
                self._issue_weights(operands, shared, tile, k, stage, barrier, rank)
                cute.copy(operands.rows.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            tile = self.next_tile(queue, turn, warp)

    @cute.jit
    def gather(self, operands, queue, tokens, shared, barriers, warp, rank):
        """Feed the ring, three warps copying the rows whose tokens warp 0 fetched."""
        lane = cute.arch.lane_idx()
        places = self.pieces.places(warp, lane)
        first, column = self.pieces.first_row(warp, lane), self.pieces.chunk(lane) * CHUNK
        base = operands.rows.tensor.iterator.toint() + column * ELEMENT_BYTES
        row_bytes = self.contraction * ELEMENT_BYTES
        addresses = cute.make_rmem_tensor((self.pieces.passes,), Int64)
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        if warp == LOADER_WARP:
            self.queue.expect(queue)
        tile = self.next_tile(queue, turn, warp)
        while tile.expert >= 0:
            slot, slot_phase = self.tokens.take(
                tokens, slot, slot_phase, self.pieces, first, base, row_bytes, addresses
            )
            rows = tile.end_row - tile.first_row - first
            for k in cutlass.range(self.k_tiles, unroll=1):
                barriers.empty.wait(stage, phase)
                if warp == LOADER_WARP:
                    barrier = barriers.full.get_barrier(stage)
                    self._issue_weights(operands, shared, tile, k, stage, barrier, rank)
                target = shared.A_values + cute.assume(stage * (self.tile.rows * TILE_DEPTH), divby=CHUNK)
                for i in cutlass.range_constexpr(self.pieces.passes):
                    inside = i * self.pieces.row_step < rows
                    if const_expr(self.contraction % TILE_DEPTH != 0):
                        inside = inside and column + k * TILE_DEPTH < self.contraction
                    place = target + cute.assume(self.pieces.offset(places, i), divby=CHUNK)
                    self.pieces.copy(i, first, addresses[i], place, inside)
                    addresses[i] += TILE_DEPTH * ELEMENT_BYTES
                barriers.full.arrive(stage, None)
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            tile = self.next_tile(queue, turn, warp)
