"""Hopper's weight gradient: every expert's Σ over its rows of left[r]ᵀ right[r], one side read through token_R.

The contraction runs over rows, so both operands lie across it in shared memory (M-major and N-major). Roles, barriers
and cluster are grouped_gemm.py's. The gathered side is 128 wide, because it costs copies; the other comes by TMA, 256
wide and multicast: the two blocks of a cluster take neighbouring tiles of the gathered side. The contiguous side of the
output is always the accumulator's N, so that stores are rows: left gathered is a tile of 128 x 256, right of 256 x 128.

An expert's rows end anywhere within a stage. There cp.async writes zeros on the gathered side and TMA on the other
(common/views.py), so that nothing of another expert or of an unused row, NaN included, gets into a sum. An expert
without rows multiplies one stage of zeros; where the output is added to, it is passed over.

A unit of work is one tile for each of the cluster's blocks, read from the cluster's queue (work_queue.py). The two
consumer warpgroups split a tile's rows.

Letters: mA (X, rows), mB (Y, rows), output (E, X, Y).
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    MbarrierArray,
    PipelineOp,
    pipeline_init_arrive,
    pipeline_init_wait,
)
from cutlass.tensor_utils import LayoutEnum

from moe_kernels.cute.common.longest_first import LongestFirst
from moe_kernels.cute.common.ring import advance, next_stage
from moe_kernels.cute.common.scheduler import CLUSTER, Work
from moe_kernels.cute.common.views import load_origin, loads_end_at_row
from moe_kernels.cute.sm90.block import CHUNK, GATHER_WARPS, LOADER_WARP, THREADS, WARPGROUP
from moe_kernels.cute.sm90.epilogue import TmaView
from moe_kernels.cute.sm90.gather import Pieces, TokenRing
from moe_kernels.cute.sm90.weight_grad_epilogue import WeightGradEpilogue
from moe_kernels.cute.sm90.work_queue import WorkQueue
from moe_kernels.cute.tiles import ELEMENT_BYTES, SHARED_MEMORY_BYTES, TILE_DEPTH, KernelForm, TileConfig

# Stages whose tokens are fetched ahead: as long as it takes to claim, find and post the next unit, which comes between.
_TOKEN_SLOTS = 8
_UNIT_SLOTS = 4  # units posted and not yet read: an expert may have a single stage


class WeightGrad:
    """One gathered side and one shape of the gradient; row counts and offsets are run-time values."""

    def __init__(
        self, form: KernelForm, *, rows: int, columns: int, dtype: type[cutlass.Numeric], tile: TileConfig
    ) -> None:
        self.tile, self.dtype = tile, dtype
        self.left_gathered = form.gathers_left
        row_tiles, column_tiles = -(-rows // tile.rows), -(-columns // tile.columns)
        # The cluster's two blocks are neighbours along the gathered side.
        row_units = -(-row_tiles // CLUSTER) if self.left_gathered else row_tiles
        self.column_units = column_tiles if self.left_gathered else -(-column_tiles // CLUSTER)
        self.gathered_width, self.packed_width = (rows, columns) if self.left_gathered else (columns, rows)
        self.gathered_tile, self.packed_tile = (
            (tile.rows, tile.columns) if self.left_gathered else (tile.columns, tile.rows)
        )
        self.pieces = Pieces(TILE_DEPTH, self.gathered_tile)
        self.tokens = TokenRing(batch=TILE_DEPTH, slots=_TOKEN_SLOTS)
        units = row_units * self.column_units
        self.queue = WorkQueue(
            order=LongestFirst(units=units, depth=TILE_DEPTH, skips_empty=form.accumulates),
            place=lambda work, rank: tuple(work),  # each reader finds its tile: _place
            claims=tile.claims_units,
            readers=8 + GATHER_WARPS,
            slots=_UNIT_SLOTS,
        )
        self.epilogue = WeightGradEpilogue(
            dtype=dtype, tile=tile, column_tiles=column_tiles, accumulates=form.accumulates
        )

    # ---- host

    @cute.jit
    def __call__(
        self,
        left: cute.Tensor,
        right: cute.Tensor,
        token_R: cute.Tensor,
        offsets_E1: cute.Tensor,
        grad: cute.Tensor,
        counter: cute.Tensor,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Launch on ``num_clusters`` clusters. ``counter`` (1,) holds zero, and will again."""
        tile = self.tile
        shape = (tile.rows, tile.columns, TILE_DEPTH)
        self.sA_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, shape, self.dtype, tile.stages)
        self.sB_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, tile.stages)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.MN, OperandMajorMode.MN, Float32, (1, 1, 1), (64, tile.columns)
        )
        if const_expr(self.left_gathered):
            gathered, packed, packed_layout = left, right, self.sB_layout
        else:
            gathered, packed, packed_layout = right, left, self.sA_layout
        packed_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            loads_end_at_row(packed),
            cute.slice_(packed_layout, (None, None, 0)),
            (self.packed_tile, TILE_DEPTH),
            num_multicast=CLUSTER,
        )
        operand, epilogue = cute.struct.Align, self.epilogue
        slots, slot_barriers = self.queue.storage()
        token_slots, token_bars = self.tokens.storage()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * tile.stages]
            work_barriers: slot_barriers
            work_slots: slots
            token_barriers: token_bars
            tokens: token_slots
            sA: operand[cute.struct.MemRange[self.dtype, cute.cosize(self.sA_layout)], 1024]
            sB: operand[cute.struct.MemRange[self.dtype, cute.cosize(self.sB_layout)], 1024]
            sStore: operand[cute.struct.MemRange[epilogue.store_dtype, cute.cosize(epilogue.store_layout())], 1024]

        self.storage = Storage
        assert Storage.size_in_bytes() <= SHARED_MEMORY_BYTES["sm90"]
        self.kernel(
            gathered,
            TmaView(*packed_view),
            token_R,
            offsets_E1,
            counter,
            epilogue.views((grad,)),
            mma,
            self.sA_layout,
            self.sB_layout,
            epilogue.store_layout(),
        ).launch(grid=(CLUSTER, num_clusters, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream)

    # ---- device

    @cute.kernel
    def kernel(
        self,
        gathered: cute.Tensor,
        packed: TmaView,
        token_R: cute.Tensor,
        offsets_E1: cute.Tensor,
        counter: cute.Tensor,
        views: tuple,
        mma: cute.TiledMma,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        sStore_layout: cute.ComposedLayout,
    ) -> None:
        """Split the block into its roles."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)
        sStore = storage.sStore.get_tensor(sStore_layout.outer, swizzle=sStore_layout.inner)
        stages = self.tile.stages
        packed_layout = sB_layout if const_expr(self.left_gathered) else sA_layout
        self.tma_bytes = cute.size_in_bytes(self.dtype, cute.slice_(packed_layout, (None, None, 0)))
        barriers = storage.barriers.data_ptr()
        full_group = CooperativeGroup(Agent.Thread, 32 * GATHER_WARPS + 1)
        full = MbarrierArray(barriers, stages, (PipelineOp.AsyncLoad, full_group), self.tma_bytes)
        empty_group = CooperativeGroup(Agent.Thread, 8 * CLUSTER)
        empty = MbarrierArray(barriers + stages, stages, (PipelineOp.AsyncThread, empty_group))
        queue = self.queue.start(offsets_E1, counter, storage)
        tokens = self.tokens.start(storage)
        pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
        if group == 0:
            cute.arch.setmaxregister_decrease(self.tile.producer_registers)
            if warp == 0:
                self._schedule(token_R, queue, tokens, warp, rank)
            elif const_expr(self.left_gathered):
                self._gather(gathered, packed, queue, tokens, storage.sA.data_ptr(), sB, full, empty, warp, rank)
            else:
                self._gather(gathered, packed, queue, tokens, storage.sB.data_ptr(), sA, full, empty, warp, rank)
        else:
            cute.arch.setmaxregister_increase(self.tile.consumer_registers)
            self._consume(queue, views, sA, sB, sStore, mma, full, empty, tidx, warp, group, rank)
        cute.arch.cluster_arrive()  # nothing may reach the shared memory of a block that has ended
        cute.arch.cluster_wait()

    @cute.jit
    def _place(self, unit, rank):
        """Return (row tile, column tile) of an expert's unit for the block ``rank``; tiles may lie past the end."""
        row_unit = unit // self.column_units
        column_unit = unit - row_unit * self.column_units
        if const_expr(self.left_gathered):
            row_unit = CLUSTER * row_unit + rank
        else:
            column_unit = CLUSTER * column_unit + rank
        return row_unit, column_unit

    @cute.jit
    def _k_tiles(self, work):
        """Return how many stages a unit takes: without rows it is one, which both kinds of copies fill with zeros."""
        return cutlass.max(cute.ceil_div(work.end_row - work.first_row, TILE_DEPTH), 1)

    @cute.jit
    def _next(self, queue, turn, warp):
        """Return the cluster's ``turn``-th unit."""
        return Work(*self.queue.read(queue, turn, warp))

    @cute.jit
    def _schedule(self, token_R, queue, tokens, warp, rank):
        """Post the cluster's units and fetch the tokens of their rows, stage by stage. Warp 0."""
        turn, slot, phase = Int32(0), Int32(0), Int32(1)
        posting = self.queue.start_posting(queue)
        searching = Boolean(True)
        while searching:
            if rank == 0:
                posting = self.queue.post(queue, posting, turn)
            work = self._next(queue, turn, warp)
            searching = work.expert >= 0
            if searching:
                row = work.first_row
                for _ in cutlass.range(self._k_tiles(work), unroll=1):
                    slot, phase = self.tokens.fill(tokens, token_R, row, work.end_row, slot, phase)
                    row += TILE_DEPTH
            turn += 1

    @cute.jit
    def _gather(self, gathered, packed, queue, tokens, values, sPacked, full, empty, warp, rank):
        """Feed the ring: three warps copy tokens' values to ``values``, the first also issues TMA."""
        lane = cute.arch.lane_idx()
        places, first = self.pieces.places(warp, lane), self.pieces.first_row(warp, lane)
        row_bytes, stage_values = self.gathered_width * ELEMENT_BYTES, self.gathered_tile * TILE_DEPTH
        addresses = cute.make_rmem_tensor((self.pieces.passes,), Int64)
        both = Int32((1 << CLUSTER) - 1)
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        if warp == LOADER_WARP:
            self.queue.expect(queue)
        work = self._next(queue, turn, warp)
        while work.expert >= 0:
            row_tile, column_tile = self._place(work.unit, rank)
            gathered_at, packed_at = column_tile, row_tile
            if const_expr(self.left_gathered):
                gathered_at, packed_at = row_tile, column_tile
            dst, src = self._partition_packed(packed, sPacked, work, packed_at, rank)
            column = gathered_at * self.gathered_tile + self.pieces.chunk(lane) * CHUNK
            base = gathered.iterator.toint() + Int64(column) * ELEMENT_BYTES
            rows = work.end_row - work.first_row - first  # that are left from this lane's first on
            # An odd number of tiles leaves the cluster's second block one that lies past the last column.
            if const_expr(self.gathered_width % (CLUSTER * self.gathered_tile) != 0):
                rows = rows if column < self.gathered_width else Int32(0)
            for k in cutlass.range(self._k_tiles(work), unroll=1):
                slot, slot_phase = self.tokens.take(
                    tokens, slot, slot_phase, self.pieces, first, base, row_bytes, addresses
                )
                empty.wait(stage, phase)
                if warp == LOADER_WARP:
                    barrier = full.get_barrier(stage)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tma_bytes)
                    cute.copy(packed.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier, mcast_mask=both)
                target = values + cute.assume(stage * stage_values, divby=CHUNK)
                for i in cutlass.range_constexpr(self.pieces.passes):
                    inside = i * self.pieces.row_step < rows
                    place = target + cute.assume(self.pieces.offset(places, i), divby=CHUNK)
                    self.pieces.copy(i, first, addresses[i], place, inside)
                full.arrive(stage, None)
                rows -= TILE_DEPTH
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            work = self._next(queue, turn, warp)

    def _partition_packed(self, packed, sPacked, work, packed_at, rank):
        origin = load_origin(work.first_row, work.end_row, self.packed_width)
        gPacked = cute.local_tile(
            cute.domain_offset(origin, packed.tensor), (self.packed_tile, TILE_DEPTH), (packed_at, None, 0, 0)
        )
        shared, memory = cute.group_modes(sPacked, 0, 2), cute.group_modes(gPacked, 0, 2)
        return cpasync.tma_partition(packed.atom, rank, cute.make_layout(CLUSTER), shared, memory)

    @cute.jit
    def _consume(self, queue, views, sA, sB, sStore, mma, full, empty, tidx, warp, group, rank):
        """Multiply what the ring brings and hand each tile to the epilogue."""
        tile, stages = self.tile, self.tile.stages
        consumer = group - 1
        in_group = tidx % WARPGROUP
        lane = tidx % 32
        row_offset = consumer * tile.warpgroup_rows
        my_A = cute.local_tile(sA, (tile.warpgroup_rows, TILE_DEPTH), (consumer, 0, None))
        tCrA = mma.make_fragment_A(mma.get_slice(0).partition_A(my_A))
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        acc_shape = mma.get_slice(in_group).partition_shape_C((tile.warpgroup_rows, tile.columns))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        state = self.epilogue.start(views, sStore, sStore, mma, None, in_group, warp, consumer)
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        work = self._next(queue, turn, warp)
        released = stage
        while work.expert >= 0:
            row_tile, column_tile = self._place(work.unit, rank)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(self._k_tiles(work), unroll=1):
                full.wait(stage, phase)
                cute.arch.fence_view_async_shared()  # cp.async writes through the generic proxy
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    cute.gemm(mma, acc, tCrA[None, None, kb, stage], tCrB[None, None, kb, stage], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                stage, phase = advance(stage, phase, stages)
                if k > 0:
                    warpgroup.wait_group(1)
                    if lane < CLUSTER:
                        empty.arrive(released, lane)
                    released = next_stage(released, stages)
            warpgroup.wait_group(0)
            if lane < CLUSTER:
                empty.arrive(released, lane)
            released = stage
            first_row = row_tile * tile.rows + row_offset
            self.epilogue.finish_tile(state, acc, first_row, work.expert, column_tile)
            turn += 1
            work = self._next(queue, turn, warp)
        self.epilogue.end(state)
