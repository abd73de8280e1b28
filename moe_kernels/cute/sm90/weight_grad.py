"""Hopper's weight gradient: every expert's Σ over its rows of left[r]ᵀ right[r], one side read through token_R.

The contraction runs over rows, so both operands lie across it in shared memory (M-major and N-major). Roles, barriers
and cluster are grouped_gemm.py's. The gathered side is 128 wide, because it costs copies; the other comes by TMA, 256
wide and multicast: the two blocks of a cluster take neighbouring tiles of the gathered side. The contiguous side of the
output is always the accumulator's N, so that stores are rows: left gathered is a tile of 128 x 256, right of 256 x 128.

An expert's rows end anywhere within a stage. There cp.async writes zeros on the gathered side and TMA on the other
(common/views.py), so that nothing of another expert or of an unused row, NaN included, gets into a sum. An expert
without rows multiplies one stage of zeros; where the output is added to, it is passed over.

A unit of work is one tile for each of the cluster's blocks, read from the cluster's queue (work_queue.py). The two
consumer warpgroups split a tile's rows, or in ping-pong take units in turn, so that one multiplies while the other
stores.

Letters: mA (X, rows), mB (Y, rows), output (E, X, Y).
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import LoadCacheMode, OperandMajorMode, cpasync, warpgroup
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
from moe_kernels.cute.common.ring import advance, next_stage, skip_by
from moe_kernels.cute.common.scheduler import CLUSTER
from moe_kernels.cute.common.views import load_origin, loads_end_at_row
from moe_kernels.cute.sm90.block import CHUNK, PRODUCTS_TURN, THREADS, WARPGROUP
from moe_kernels.cute.sm90.epilogue import TmaView
from moe_kernels.cute.sm90.weight_grad_epilogue import WeightGradEpilogue
from moe_kernels.cute.sm90.work_queue import FIELDS, SLOTS, WorkQueue
from moe_kernels.cute.tiles import SHARED_MEMORY_BYTES, KernelForm, TileConfig

# Rows of a unit still to be loaded when the next unit is claimed, and when it is posted: a claim's answer and the
# search for its expert each take about as long as it takes to multiply so many.
_CLAIM_AHEAD, _POST_AHEAD = 384, 192


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
        self.row_threads = WARPGROUP * CHUNK // self.gathered_tile  # tokens that the warpgroup copies at a time
        units = row_units * self.column_units
        order = LongestFirst(units=units, depth=tile.depth, skips_empty=form.accumulates)
        self.queue = WorkQueue(order=order, claims=tile.claims_units, readers=12)
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
        shape = (tile.rows, tile.columns, tile.depth)
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
            (self.packed_tile, self.tile.depth),
            num_multicast=CLUSTER,
        )
        operand, epilogue = cute.struct.Align, self.epilogue
        slots, slot_barriers = self.queue.storage()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * tile.stages]
            work_barriers: slot_barriers
            work_slots: slots
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
        full_group = CooperativeGroup(Agent.Thread, WARPGROUP + 1)
        full = MbarrierArray(barriers, stages, (PipelineOp.AsyncLoad, full_group), self.tma_bytes)
        empty_group = CooperativeGroup(Agent.Thread, (4 if self.tile.ping_pong else 8) * CLUSTER)
        empty = MbarrierArray(barriers + stages, stages, (PipelineOp.AsyncThread, empty_group))
        slots = storage.work_slots.get_tensor(cute.make_layout((FIELDS, SLOTS)))
        work = self.queue.start(offsets_E1, counter, slots, storage.work_barriers.data_ptr())
        pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
        if group == 0:
            cute.arch.setmaxregister_decrease(self.tile.producer_registers)
            if const_expr(self.left_gathered):
                self._gather(gathered, packed, token_R, work, sA, sB, full, empty, tidx, warp, rank)
            else:
                self._gather(gathered, packed, token_R, work, sB, sA, full, empty, tidx, warp, rank)
        else:
            cute.arch.setmaxregister_increase(self.tile.consumer_registers)
            self._consume(work, views, sA, sB, sStore, mma, full, empty, tidx, warp, group, rank)
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
        return cutlass.max(cute.ceil_div(work.end_row - work.first_row, self.tile.depth), 1)

    @cute.jit
    def _gather(self, gathered, packed, token_R, queue, sGathered, sPacked, full, empty, tidx, warp, rank):
        """Feed the ring: all four warps copy tokens' values, the first also issues TMA and posts units."""
        posts = warp == 0 and rank == 0
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
        )
        chunks = self.gathered_tile // CHUNK
        threads = cute.make_ordered_layout((chunks, self.row_threads), order=(0, 1))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((CHUNK, 1)))
        tGsG = copy.get_slice(tidx).partition_D(sGathered)  # ((8, 1), 1, passes, stages)
        passes = self.tile.depth // self.row_threads
        tokens = cute.make_rmem_tensor((passes,), Int32)
        both = Int32((1 << CLUSTER) - 1)
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        cursor, number = self.queue.start_posting(queue, warp, rank)
        work = self.queue.read(queue, turn, warp)
        while work.expert >= 0:
            row_tile, column_tile = self._place(work.unit, rank)
            gathered_at, packed_at = column_tile, row_tile
            if const_expr(self.left_gathered):
                gathered_at, packed_at = row_tile, column_tile
            first, end = work.first_row, work.end_row
            k_tiles = self._k_tiles(work)
            origin = load_origin(first, end, self.packed_width)
            gPacked = cute.local_tile(
                cute.domain_offset(origin, packed.tensor), (self.packed_tile, self.tile.depth), (packed_at, None, 0, 0)
            )
            dst, src = cpasync.tma_partition(
                packed.atom,
                rank,
                cute.make_layout(CLUSTER),
                cute.group_modes(sPacked, 0, 2),
                cute.group_modes(gPacked, 0, 2),
            )
            column = gathered_at * self.gathered_tile + (tidx % chunks) * CHUNK
            base = gathered.iterator + cute.assume(column, divby=CHUNK)
            row = first + tidx // chunks
            self._read_tokens(token_R, row, end, column, tokens)
            for k in cutlass.range(k_tiles, unroll=1):
                empty.wait(stage, phase)
                if posts and k == cutlass.max(k_tiles - _CLAIM_AHEAD // self.tile.depth, 0):
                    number = self.queue.claim(queue, number)
                if warp == 0:
                    barrier = full.get_barrier(stage)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tma_bytes)
                    cute.copy(packed.atom, src[None, k], dst[None, stage], tma_bar_ptr=barrier, mcast_mask=both)
                for i in cutlass.range_constexpr(passes):
                    inside = cute.make_rmem_tensor((1,), Boolean)
                    inside[0] = tokens[i] >= 0
                    offset = Int64(cutlass.max(tokens[i], 0)) * self.gathered_width
                    chunk = cute.make_tensor(base + cute.assume(offset, divby=CHUNK), cute.make_layout(((CHUNK, 1),)))
                    cute.copy(atom, chunk, tGsG[None, 0, i, stage], pred=inside)
                full.arrive(stage, None)
                if posts and k == cutlass.max(k_tiles - _POST_AHEAD // self.tile.depth, 0):
                    cursor = self.queue.post(queue, cursor, number, turn + 1)
                row += self.tile.depth
                self._read_tokens(token_R, row, end, column, tokens)  # in flight while the next stage is awaited
                stage, phase = advance(stage, phase, self.tile.stages)
            turn += 1
            work = self.queue.read(queue, turn, warp)

    @cute.jit
    def _read_tokens(self, token_R, first_row, end, column, tokens):
        """Read the tokens of this thread's rows of a stage; -1 where it must write zeros."""
        for i in cutlass.range_constexpr(self.tile.depth // self.row_threads):
            row = first_row + i * self.row_threads
            token = token_R[row] if row < end else Int32(-1)
            # An odd number of tiles leaves the cluster's second block one that lies past the last column.
            if const_expr(self.gathered_width % (CLUSTER * self.gathered_tile) != 0):
                token = token if column < self.gathered_width else Int32(-1)
            tokens[i] = token

    @cute.jit
    def _consume(self, queue, views, sA, sB, sStore, mma, full, empty, tidx, warp, group, rank):
        """Multiply what the ring brings and hand each tile to the epilogue."""
        tile, stages = self.tile, self.tile.stages
        consumer = group - 1
        in_group = tidx % WARPGROUP
        lane = tidx % 32
        row_offset, my_A = Int32(0), sA
        if const_expr(not tile.ping_pong):
            row_offset = consumer * tile.warpgroup_rows
            my_A = cute.local_tile(sA, (tile.warpgroup_rows, tile.depth), (consumer, 0, None))
        tCrA = mma.make_fragment_A(mma.get_slice(0).partition_A(my_A))
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        acc_shape = mma.get_slice(in_group).partition_shape_C((tile.warpgroup_rows, tile.columns))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        state = self.epilogue.start(views, sStore, sStore, mma, None, in_group, warp, consumer)
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        if const_expr(tile.ping_pong):
            if consumer == 1:  # before it asks for its own unit, which is posted only while the other multiplies
                cute.arch.barrier_arrive(barrier_id=PRODUCTS_TURN, number_of_threads=2 * WARPGROUP)
                self.epilogue.give_turn(consumer)
        work = self.queue.read(queue, turn, warp)
        if const_expr(tile.ping_pong):
            if consumer == 1:
                stage, phase, turn, work = self._pass_over(queue, work, turn, stage, phase, warp)
        released = stage
        while work.expert >= 0:
            row_tile, column_tile = self._place(work.unit, rank)
            if const_expr(tile.ping_pong):
                cute.arch.barrier(barrier_id=PRODUCTS_TURN + consumer, number_of_threads=2 * WARPGROUP)
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
            if const_expr(tile.ping_pong):
                cute.arch.barrier_arrive(barrier_id=PRODUCTS_TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
            warpgroup.wait_group(0)
            if lane < CLUSTER:
                empty.arrive(released, lane)
            first_row = row_tile * tile.rows + row_offset
            self.epilogue.finish_tile(state, acc, first_row, work.expert, column_tile)
            turn += 1
            work = self.queue.read(queue, turn, warp)
            if const_expr(tile.ping_pong):
                stage, phase, turn, work = self._pass_over(queue, work, turn, stage, phase, warp)
            released = stage
        self.epilogue.end(state)

    @cute.jit
    def _pass_over(self, queue, others, turn, stage, phase, warp):
        """Return the ring's place behind a unit that is the other warpgroup's, and the unit after it with its turn."""
        stage, phase = skip_by(stage, phase, self._k_tiles(others), self.tile.stages)
        work = others
        if others.expert >= 0:  # else it says that nothing follows, and is the last to be read
            turn += 1
            work = self.queue.read(queue, turn, warp)
        return stage, phase, turn, work
