"""The producer warps of grouped_gemm.py: they claim units, and feed the ring with each one's rows and weights.

Rows are gathered by all four warps with cp.async, or come packed by TMA from one warp; weights come by TMA. How units
are claimed and found is work_queue.py and common/scheduler.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync
from cutlass.pipeline import MbarrierArray

from moe_kernels.cute.common.ring import advance
from moe_kernels.cute.common.scheduler import CLUSTER, ExpertByExpert, row_tile
from moe_kernels.cute.common.views import load_origin
from moe_kernels.cute.sm90.block import CHUNK, WARPGROUP
from moe_kernels.cute.sm90.epilogue import TmaView
from moe_kernels.cute.sm90.work_queue import WorkQueue, lookahead
from moe_kernels.cute.tiles import ELEMENT_BYTES, TILE_DEPTH, KernelForm, TileConfig

_ROWS_PER_PASS = WARPGROUP * CHUNK // TILE_DEPTH


class Operands(NamedTuple):
    """The inputs on the device. ``weights_alone`` loads a block's whole tile of weights, ``weights`` half of it."""

    rows: TmaView
    weights: TmaView
    weights_alone: TmaView
    token_R: cute.Tensor


class SharedTensors(NamedTuple):
    """A: (rows, depth, stages). B: (columns, depth, stages) for the MMA; B_box is the same memory as TMA writes it."""

    A: cute.Tensor
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
        self.column_tiles, self.halves = column_tiles, form.halves
        self.k_tiles = -(-contraction // TILE_DEPTH)
        self.tma_bytes = (tile.columns + (0 if form.gathers else tile.rows)) * TILE_DEPTH * ELEMENT_BYTES
        self.ahead = lookahead(self.k_tiles)
        self.queue = WorkQueue(
            order=ExpertByExpert(columns=column_tiles, tile_rows=tile.rows),
            claims=tile.claims_units,
            readers=8 + (4 if form.gathers else 1),
            claimed_units=self.ahead.claimed_units,
            posted_units=self.ahead.posted_units,
        )

    @cute.jit
    def next_tile(self, queue, turn, warp, rank):
        """Return this block's tile of the cluster's ``turn``-th unit."""
        return row_tile(self.queue.read(queue, turn, warp), rank, self.column_tiles, self.tile.rows)

    @cute.jit
    def _post_ahead(self, queue, cursor, number, turn, k):
        """Post and claim what is due at stage ``k`` of the ``turn``-th unit, in this order: a post uses the last claim.

        Returns the cursor and the number of the warp that posts.
        """
        if k == self.ahead.post_at:
            cursor = self.queue.post(queue, cursor, number, turn + self.ahead.posted_units)
        if k == self.ahead.claim_at:
            number = self.queue.claim(queue, number)
        return cursor, number

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
    def load(self, operands, queue, shared, barriers, warp, rank):
        """Feed the ring by TMA alone. One warp."""
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        cursor, number = self.queue.start_posting(queue, warp, rank)
        tile = self.next_tile(queue, turn, warp, rank)
        while tile.expert >= 0:
            dst, src = self._partition_rows(operands, shared, tile)
            for k in cutlass.range(self.k_tiles, unroll=1):
                barriers.empty.wait(stage, phase)
                barrier = barriers.full.get_barrier(stage)
                self._issue_weights(operands, shared, tile, k, stage, barrier, rank)
                cute.copy(operands.rows.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier)
                if rank == 0:
                    cursor, number = self._post_ahead(queue, cursor, number, turn, k)
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            tile = self.next_tile(queue, turn, warp, rank)
        self.queue.end(queue, cursor, number, turn, warp, rank)

    @cute.jit
    def gather(self, operands, queue, shared, barriers, tidx, warp, rank):
        """Feed the ring, all four warps copying rows that ``token_R`` names."""
        cache = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(cache, self.dtype, num_bits_per_copy=128)
        threads = cute.make_ordered_layout((_ROWS_PER_PASS, TILE_DEPTH // CHUNK), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, CHUNK)))
        tAsA = copy.get_slice(tidx).partition_D(shared.A)  # ((8, 1), passes, 1, stages)
        passes = self.tile.rows // _ROWS_PER_PASS
        tokens = cute.make_rmem_tensor((passes,), Int32)
        tokens_next = cute.make_rmem_tensor((passes,), Int32)
        first_column = (tidx % (TILE_DEPTH // CHUNK)) * CHUNK
        base = operands.rows.tensor.iterator + cute.assume(first_column, divby=CHUNK)
        posts = warp == 0 and rank == 0
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        cursor, number = self.queue.start_posting(queue, warp, rank)
        tile = self.next_tile(queue, turn, warp, rank)
        self._read_indices(operands.token_R, tile, tidx, tokens_next)
        while tile.expert >= 0:
            for i in cutlass.range_constexpr(passes):
                tokens[i] = tokens_next[i]
            upcoming = tile
            for k in cutlass.range(self.k_tiles, unroll=1):
                barriers.empty.wait(stage, phase)
                if warp == 0:
                    barrier = barriers.full.get_barrier(stage)
                    self._issue_weights(operands, shared, tile, k, stage, barrier, rank)
                for i in cutlass.range_constexpr(passes):
                    self._copy_chunk(atom, base, tokens[i], k, first_column, tAsA[None, i, 0, stage])
                barriers.full.arrive(stage, None)
                if posts:
                    cursor, number = self._post_ahead(queue, cursor, number, turn, k)
                if k == self.ahead.read_at:
                    upcoming = self.next_tile(queue, turn + 1, warp, rank)
                    self._read_indices(operands.token_R, upcoming, tidx, tokens_next)
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            tile = upcoming
        self.queue.end(queue, cursor, number, turn, warp, rank)

    @cute.jit
    def _copy_chunk(self, atom, base, token, k, column, dst):
        """Copy 16 bytes of a token's row, or write zeros: for a row past the expert's end, or past the contraction's.

        Zeros cost neither a read nor, in the tensor cores, the power that repeating a row would.
        """
        inside = cute.make_rmem_tensor((1,), cutlass.Boolean)
        inside[0] = token >= 0
        if const_expr(self.contraction % TILE_DEPTH != 0):
            inside[0] = token >= 0 and column + k * TILE_DEPTH < self.contraction
        offset = Int64(cutlass.max(token, 0)) * self.contraction + k * TILE_DEPTH
        chunk = cute.make_tensor(base + cute.assume(offset, divby=CHUNK), cute.make_layout(((CHUNK, 1),)))
        cute.copy(atom, chunk, dst, pred=inside)

    @cute.jit
    def _read_indices(self, token_R, tile, tidx, tokens):
        """Read the tokens of this thread's rows, -1 for rows past the expert's end."""
        if tile.expert >= 0:
            for i in cutlass.range_constexpr(self.tile.rows // _ROWS_PER_PASS):
                row = tile.first_row + tidx // (TILE_DEPTH // CHUNK) + _ROWS_PER_PASS * i
                tokens[i] = token_R[row] if row < tile.end_row else Int32(-1)
