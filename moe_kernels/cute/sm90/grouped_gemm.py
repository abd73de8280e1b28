"""Hopper's grouped GEMM over packed rows: up, rows_matmul and down_backward are its forms (weight_grad.py: the rest).

Every expert multiplies its own rows with its own matrix. 384 threads a block, clusters of two blocks, persistent:

    warpgroup 0     producer. Warp 0 claims units (work_queue.py) and fetches the tokens of gathered rows, ahead of the
                    others. Rows: by TMA from warp 1 where they are packed; where they are gathered, warps 1 to 3 copy
                    16 bytes a thread with cp.async (gather.py). Weights: by TMA from warp 1, each block loading one
                    half for both (alone: all for itself, see common/scheduler.py).
    warpgroups 1, 2 consumers. Either each computes 64 of a tile's 128 rows, or (ping-pong) they compute whole tiles in
                    turn, and while one is in its epilogue, the other has the tensor cores.

    full[s]   96 copying threads + 1 for the bytes of TMA, or that 1    -> the consumers of the stage
    empty[s]  every consumer warp of both blocks                        -> the producers of both: weights are multicast
    named barriers: block.py

Letters: mA (rows, X), mB (Y, X, E) or (N, X, 2, E) for [gate | up] weights; X is the contraction, Y or N the columns.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, cute
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

from moe_kernels.cute.common.ring import advance, next_stage, skip
from moe_kernels.cute.common.scheduler import CLUSTER
from moe_kernels.cute.common.views import loads_end_at_row
from moe_kernels.cute.sm90.block import GATHER_WARPS, LOADER_WARP, PRODUCTS_TURN, THREADS, WARPGROUP
from moe_kernels.cute.sm90.epilogue import StoreEpilogue, TmaView
from moe_kernels.cute.sm90.loader import Barriers, Loader, Operands, SharedTensors
from moe_kernels.cute.sm90.swiglu_epilogue import SwiGLUBackwardEpilogue, SwiGLUEpilogue
from moe_kernels.cute.tiles import SHARED_MEMORY_BYTES, TILE_DEPTH, KernelForm, TileConfig


class Products(NamedTuple):
    """What a warpgroup multiplies for a tile of ``columns`` columns, and the accumulators."""

    columns: cutlass.Constexpr
    acc: cute.Tensor
    A: cute.Tensor
    B: cute.Tensor


class GroupedGemm:
    """One form for one width of contraction and of output. Everything else about the problem is a run-time value."""

    def __init__(
        self, form: KernelForm, *, contraction: int, columns: int, dtype: type[cutlass.Numeric], tile: TileConfig
    ) -> None:
        self.form, self.tile, self.dtype = form, tile, dtype
        self.contraction = contraction
        self.is_gated = form in (KernelForm.up, KernelForm.up_inference)
        self.gathers = form.gathers
        self.k_major = self.is_gated or form is KernelForm.rows_matmul_k_major
        self.k_tiles = -(-contraction // TILE_DEPTH)
        self.halves = 2 if self.is_gated else 1
        self.column_tiles = -(-columns // (tile.columns // self.halves))
        self.last_columns = self._last_columns(columns) if tile.cuts_last_column else tile.columns
        self.consumer_warps = 4 if tile.ping_pong else 8
        self.loader = Loader(form, contraction=contraction, column_tiles=self.column_tiles, dtype=dtype, tile=tile)
        self.queue = self.loader.queue
        self.epilogue = self._make_epilogue()

    def _make_epilogue(self) -> StoreEpilogue:
        if self.is_gated:
            stores_h = self.form is KernelForm.up
            return SwiGLUEpilogue(dtype=self.dtype, tile=self.tile, column_tiles=self.column_tiles, stores_h=stores_h)
        is_backward = self.form is KernelForm.down_backward
        epilogue = SwiGLUBackwardEpilogue if is_backward else StoreEpilogue
        return epilogue(dtype=self.dtype, tile=self.tile, column_tiles=self.column_tiles)

    def _last_columns(self, columns: int) -> int:
        """Return how many columns of the accumulator the last column tile of ``columns`` has to multiply.

        What is cut lies at its end, so that accumulators stay one range of registers (apart, products wait for each
        other), in whole swizzle atoms of the weights.
        """
        padding = self.column_tiles * (self.tile.columns // self.halves) - columns
        atom = 8 if self.k_major else 64
        return self.tile.columns - padding // atom * atom

    # ---- host

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # (T, X) if gathered, else (R, X)
        weights: cute.Tensor,  # (E, 2N, X), (E, Y, X) or, if not k_major, (E, X, Y)
        token_R: cute.Tensor,
        offsets_E1: cute.Tensor,
        epilogue_tensors: tuple,  # its outputs, then its own inputs
        counter: cute.Tensor,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Launch on ``num_clusters`` clusters. ``counter`` (1,) holds zero, and will again."""
        self._make_layouts()
        mB = self._weights_view(weights)
        box_layout = cute.slice_(self.sB_box_layout, (*[None] * (cute.rank(self.sB_box_layout) - 1), 0))
        box = (self.tile.columns // self.halves, TILE_DEPTH, *[2] * (self.halves - 1))
        multicast = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), mB, box_layout, box, num_multicast=CLUSTER
        )
        alone = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mB, box_layout, box)
        if const_expr(self.gathers):
            rows_view = TmaView(alone[0], rows)  # the atom is not used
        else:
            rows_view = TmaView(
                *cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    self._rows_view(rows),
                    cute.slice_(self.sA_layout, (None, None, 0)),
                    (self.tile.rows, TILE_DEPTH),
                )
            )
        operands = Operands(rows_view, TmaView(*multicast), TmaView(*alone), token_R)
        self.storage = self._make_storage()
        assert self.storage.size_in_bytes() <= SHARED_MEMORY_BYTES["sm90"]
        self.kernel(
            operands,
            offsets_E1,
            counter,
            self.epilogue.views(epilogue_tensors),
            self._make_mma(),
            self.sA_layout,
            self.sB_layout,
            self.sB_box_layout,
            self.epilogue.store_layout(),
            self.epilogue.load_layout(),
        ).launch(grid=(CLUSTER, num_clusters, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream)

    def _make_layouts(self) -> None:
        tile = self.tile
        shape = (tile.rows, tile.columns, TILE_DEPTH)
        b_order = LayoutEnum.ROW_MAJOR if self.k_major else LayoutEnum.COL_MAJOR
        self.sA_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, tile.stages)
        self.sB_layout = sm90.make_smem_layout_b(b_order, shape, self.dtype, tile.stages)
        self.sB_box_layout = self.sB_layout
        if self.is_gated:
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
            self.sB_box_layout = cute.tile_to_shape(
                atom, (tile.columns // 2, TILE_DEPTH, 2, tile.stages), order=(0, 1, 2, 3)
            )

    def _make_mma(self, columns: int | None = None) -> cute.TiledMma:
        b_mode = OperandMajorMode.K if self.k_major else OperandMajorMode.MN
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_mode, Float32, (1, 1, 1), (64, columns or self.tile.columns)
        )

    def _weights_view(self, weights: cute.Tensor) -> cute.Tensor:
        """Return (Y, X, E), or (N, X, 2, E): the halves apart, so that one box takes the same columns of both."""
        if self.is_gated:
            num_experts, rows, width = weights.shape
            half = rows // 2
            layout = cute.make_layout((half, width, 2, num_experts), stride=(width, 1, half * width, rows * width))
            return cute.make_tensor(weights.iterator, layout)
        mode = [1, 2, 0] if self.k_major else [2, 1, 0]
        return cute.make_tensor(weights.iterator, cute.select(weights.layout, mode=mode))

    def _rows_view(self, rows: cute.Tensor) -> cute.Tensor:
        """Return ``loads_end_at_row`` with rows first. Zeros take less power in the tensor cores than others' rows."""
        view = loads_end_at_row(rows)
        return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0, 2, 3]))

    def _make_storage(self) -> type:
        operand = cute.struct.Align
        epilogue = self.epilogue
        slots, slot_barriers = self.queue.storage()
        token_slots, token_bars = self.loader.tokens.storage()

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[Int64, 2 * self.tile.stages]
            work_barriers: slot_barriers
            work_slots: slots
            token_barriers: token_bars
            tokens: token_slots
            loads: cute.struct.MemRange[Int64, max(1, 2 * self.tile.load_stages)]
            sA: operand[cute.struct.MemRange[self.dtype, cute.cosize(self.sA_layout)], 1024]
            sB: operand[cute.struct.MemRange[self.dtype, cute.cosize(self.sB_layout)], 1024]
            sStore: operand[cute.struct.MemRange[self.dtype, cute.cosize(epilogue.store_layout())], 1024]
            sLoad: operand[cute.struct.MemRange[self.dtype, epilogue.load_elements()], 1024]

        return Storage

    # ---- device

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        offsets_E1: cute.Tensor,
        counter: cute.Tensor,
        views: tuple,
        mma: cute.TiledMma,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        sB_box_layout: cute.ComposedLayout,
        sStore_layout: cute.ComposedLayout,
        sLoad_layout: cute.ComposedLayout,
    ) -> None:
        """Split the block into its roles."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = SmemAllocator().allocate(self.storage)
        shared = SharedTensors(
            storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner),
            storage.sA.data_ptr(),
            storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner),
            storage.sB.get_tensor(sB_box_layout.outer, swizzle=sB_box_layout.inner),
        )
        sStore = storage.sStore.get_tensor(sStore_layout.outer, swizzle=sStore_layout.inner)
        sLoad = storage.sLoad.get_tensor(sLoad_layout.outer, swizzle=sLoad_layout.inner)
        stages = self.tile.stages
        full_op, full_count = PipelineOp.TmaLoad, 1
        if const_expr(self.gathers):
            full_op, full_count = PipelineOp.AsyncLoad, 32 * GATHER_WARPS + 1
        full_group = CooperativeGroup(Agent.Thread, full_count)
        empty_group = CooperativeGroup(Agent.Thread, self.consumer_warps * CLUSTER)
        ring = storage.ring.data_ptr()
        barriers = Barriers(
            MbarrierArray(ring, stages, (full_op, full_group), self.loader.tma_bytes),
            MbarrierArray(ring + stages, stages, (PipelineOp.AsyncThread, empty_group)),
            self._load_barriers(storage),
        )
        queue = self.queue.start(offsets_E1, counter, storage)
        tokens = self.loader.tokens.start(storage)
        pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
        if group == 0:
            cute.arch.setmaxregister_decrease(self.tile.producer_registers)
            if warp == 0:
                self.loader.schedule(operands, queue, tokens, warp, rank)
            elif const_expr(self.gathers):
                self.loader.gather(operands, queue, tokens, shared, barriers, warp, rank)
            elif warp == LOADER_WARP:
                self.loader.load(operands, queue, shared, barriers, warp, rank)
        else:
            cute.arch.setmaxregister_increase(self.tile.consumer_registers)
            self._consume(queue, views, shared, sStore, sLoad, mma, barriers, tidx, warp, group)
        cute.arch.cluster_arrive()  # nothing may reach the shared memory of a block that has ended
        cute.arch.cluster_wait()

    def _load_barriers(self, storage):
        if self.tile.load_stages == 0:
            return None
        group = CooperativeGroup(Agent.Thread, 1)
        return MbarrierArray(storage.loads.data_ptr(), 2 * self.tile.load_stages, (PipelineOp.TmaLoad, group))

    @cute.jit
    def _consume(self, queue, views, shared, sStore, sLoad, mma, barriers, tidx, warp, group):
        """Multiply what the ring brings and hand each tile to the epilogue."""
        tile_config = self.tile
        consumer = group - 1
        in_group = tidx % WARPGROUP
        row_offset = Int32(0) if const_expr(tile_config.ping_pong) else consumer * tile_config.warpgroup_rows
        acc_shape = mma.get_slice(in_group).partition_shape_C((tile_config.warpgroup_rows, tile_config.columns))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        wide = self._products(shared, consumer, acc, tile_config.columns)
        narrow = self._products(shared, consumer, acc, self.last_columns)
        blocks = tile_config.warpgroup_rows // 64
        hand_over = (barriers, consumer, tidx % 32)
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        state = self.epilogue.start(views, sStore, sLoad, mma, barriers.loaded, in_group, warp, consumer)
        if const_expr(tile_config.ping_pong):
            if consumer == 1:  # before it asks for its own tile, which may be posted only while the other multiplies
                cute.arch.barrier_arrive(barrier_id=PRODUCTS_TURN, number_of_threads=2 * WARPGROUP)
                self.epilogue.give_turn(consumer)
        tile = self.loader.next_tile(queue, turn, warp)
        if const_expr(tile_config.ping_pong):
            if consumer == 1:
                stage, phase, turn, tile = self._pass_over(queue, tile, turn, stage, phase, warp)
        while tile.expert >= 0:
            first_row = tile.first_row + row_offset
            has_rows = first_row < tile.end_row
            if has_rows:
                self.epilogue.begin_tile(state, first_row, tile.end_row, tile.column)
            if const_expr(tile_config.ping_pong):
                cute.arch.barrier(barrier_id=PRODUCTS_TURN + consumer, number_of_threads=2 * WARPGROUP)
            is_full = first_row + 64 * (blocks - 1) < tile.end_row
            if const_expr(self.last_columns < tile_config.columns):
                if tile.column < self.column_tiles - 1:
                    stage, phase = self._multiply(wide, hand_over, stage, phase, is_full)
                else:
                    stage, phase = self._multiply(narrow, hand_over, stage, phase, is_full)
            else:
                stage, phase = self._multiply(wide, hand_over, stage, phase, is_full)
            if has_rows:
                self.epilogue.finish_tile(state, acc, first_row, tile.end_row, tile.column)
            turn += 1
            tile = self.loader.next_tile(queue, turn, warp)
            if const_expr(tile_config.ping_pong):
                stage, phase, turn, tile = self._pass_over(queue, tile, turn, stage, phase, warp)
        self.epilogue.end(state)

    @cute.jit
    def _pass_over(self, queue, others, turn, stage, phase, warp):
        """Return the ring's place behind a tile that is the other warpgroup's, and the tile after it with its turn."""
        stage, phase = skip(stage, phase, self.k_tiles, self.tile.stages)
        tile = others
        if others.expert >= 0:  # else it says that nothing follows, and is the last to be read
            turn += 1
            tile = self.loader.next_tile(queue, turn, warp)
        return stage, phase, turn, tile

    def _products(self, shared, consumer, acc, columns):
        """Return the products of a tile's first ``columns`` columns for one warpgroup."""
        sA, rows = shared.A, self.tile.warpgroup_rows
        if const_expr(not self.tile.ping_pong):
            sA = cute.local_tile(shared.A, (rows, TILE_DEPTH), (consumer, 0, None))
        sB = cute.local_tile(shared.B, (columns, TILE_DEPTH), (0, 0, None))
        mma = self._make_mma(columns).get_slice(0)
        (pair, pairs, _), *rest = acc.shape
        part = cute.make_tensor(acc.iterator, cute.make_layout(((pair, pairs, columns // 8), *rest), stride=acc.stride))
        return Products(
            columns, part, mma.make_fragment_A(mma.partition_A(sA)), mma.make_fragment_B(mma.partition_B(sB))
        )

    def _gemm(self, mma, acc, a, b, blocks: int) -> None:
        """Issue the products of the first ``blocks`` blocks of 64 rows."""
        if blocks < self.tile.warpgroup_rows // 64:
            a, acc = cute.append_ones(a[None, 0], up_to_rank=2), cute.append_ones(acc[None, 0, 0], up_to_rank=3)
        cute.gemm(mma, acc, a, b, acc)

    @cute.jit
    def _multiply(self, products, hand_over, stage, phase, is_full):
        """Multiply, but no last block of 64 rows that holds no row: ``_run``."""
        blocks = self.tile.warpgroup_rows // 64
        if is_full:
            stage, phase = self._run(products, hand_over, stage, phase, blocks)
        else:
            stage, phase = self._run(products, hand_over, stage, phase, blocks - 1)
        return stage, phase

    @cute.jit
    def _run(self, products, hand_over, stage, phase, blocks: cutlass.Constexpr):
        """Multiply the first ``blocks`` blocks of 64 rows. Returns the new place in the ring; products are complete."""
        barriers, consumer, lane = hand_over
        released, stages = stage, self.tile.stages
        mma = self._make_mma(products.columns)  # its accumulate flag changes in here: one of its own for each branch
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(self.k_tiles, unroll=1):
            barriers.full.wait(stage, phase)
            if const_expr(self.gathers):  # cp.async writes through the generic proxy, WGMMA reads through the other
                cute.arch.fence_view_async_shared()
            if const_expr(blocks > 0):
                warpgroup.fence()
                for kb in cutlass.range_constexpr(TILE_DEPTH // 16):
                    a, b = (operand[None, None, kb, stage] for operand in (products.A, products.B))
                    self._gemm(mma, products.acc, a, b, blocks)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
            stage, phase = advance(stage, phase, stages)
            if k > 0:
                if const_expr(blocks > 0):
                    warpgroup.wait_group(1)
                if lane < CLUSTER:
                    barriers.empty.arrive(released, lane)
                released = next_stage(released, stages)
        if const_expr(self.tile.ping_pong):
            cute.arch.barrier_arrive(barrier_id=PRODUCTS_TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
        if const_expr(blocks > 0):
            warpgroup.wait_group(0)
        if lane < CLUSTER:
            barriers.empty.arrive(released, lane)
        return stage, phase
