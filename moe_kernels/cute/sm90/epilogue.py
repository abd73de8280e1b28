"""What happens to a tile of accumulators before it reaches memory: one class per kind of grouped GEMM.

A consumer warpgroup works alone, with slots of shared memory of its own or (ping-pong) in its turn. It turns its
accumulators into values 16 x 16 at a time and stores them with stmatrix into a sub-tile; its first warp hands finished
sub-tiles to TMA, which clips them at the expert's last row (common/views.py). A set of slots holds the sub-tiles that
leave together. Who calls this: grouped_gemm.py and weight_grad.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import Any, NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum

from moe_kernels.cute.common.swiglu import swiglu_backward_point, swiglu_point
from moe_kernels.cute.common.views import store_origin, stores_end_at_row
from moe_kernels.cute.tiles import KernelForm, TileConfig

_WARPGROUP = 128
_BARRIER = 3  # named barriers 3 and 4, one per consumer warpgroup
_TURN = 5  # 5 and 6: in ping-pong, a warpgroup's turn with the slots that both use


class TmaView(NamedTuple):
    """A TMA copy and the tensor of coordinates that it takes."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class EpilogueState(NamedTuple):
    """What one thread keeps from tile to tile; nothing in it changes."""

    views: tuple
    sStore: cute.Tensor  # this warpgroup's slots: (rows, columns, slots)
    sLoad: cute.Tensor
    copy_store: Any
    copy_load: Any
    loaded: Any  # barriers of all loaded sub-tiles
    first_loaded: Int32  # this warpgroup's first
    in_group: Int32
    consumer: Int32
    is_store_warp: cutlass.Boolean


class StoreEpilogue:
    """Rounds the accumulators and stores them: rows_matmul. The others build on it."""

    num_stored = 1

    def __init__(self, *, dtype: type[cutlass.Numeric], tile: TileConfig, column_tiles: int, halves: int = 1) -> None:
        self.dtype, self.tile, self.column_tiles = dtype, tile, column_tiles
        self.columns = tile.columns // halves  # of the output
        self.sub_tiles = self.columns // tile.store_columns
        self.box = (tile.warpgroup_rows // tile.row_blocks, tile.store_columns)

    # ---- host

    def store_layout(self) -> cute.ComposedLayout:
        """Return the layout of all slots: (rows, columns, slots)."""
        slots = self.tile.epilogues * self.num_stored * self.tile.store_sets
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, self.box, slots)

    def load_layout(self) -> cute.ComposedLayout:
        """Return the layout of loaded sub-tiles; only down_backward has any."""
        slots = self.tile.epilogues * 2 * max(1, self.tile.load_stages)
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, self.box, slots)

    def load_elements(self) -> int:
        """Return how many elements of shared memory ``load_layout`` takes."""
        return cute.cosize(self.load_layout()) if self.tile.load_stages > 0 else 8

    def views(self, tensors: tuple[cute.Tensor, ...]) -> tuple:
        """Return what the device needs of the tensors."""
        (out,) = tensors
        return (self.store_view(stores_end_at_row(out)),)

    def store_view(self, rows: cute.Tensor) -> TmaView:
        """Return the TMA store of one sub-tile of ``rows``."""
        layout = cute.slice_(self.store_layout(), (None, None, 0))
        return TmaView(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), rows, layout, self.box))

    # ---- device

    @cute.jit
    def start(self, views, sStore, sLoad, mma, loaded, in_group, warp, consumer):
        """Return the state for a thread of ``consumer``."""
        stmatrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype)
        ldmatrix = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), self.dtype)
        ownership = cute.make_tiled_copy_C_atom(stmatrix, mma)
        copy_store = cute.make_tiled_copy_S(stmatrix, ownership)
        copy_load = cute.make_tiled_copy_S(ldmatrix, ownership)
        mine, my_loads, owner = sStore, sLoad, Int32(0)
        if const_expr(self.tile.epilogues == 2):
            owner = consumer
            mine = cute.local_tile(sStore, (*self.box, self.num_stored * self.tile.store_sets), (0, 0, owner))
            if const_expr(self.tile.load_stages > 0):
                my_loads = cute.local_tile(sLoad, (*self.box, 2 * self.tile.load_stages), (0, 0, owner))
        return EpilogueState(
            views,
            mine,
            my_loads,
            copy_store,
            copy_load,
            loaded,
            owner * self.tile.load_stages,
            in_group,
            consumer,
            warp % 4 == 0,
        )

    @cute.jit
    def begin_tile(self, state, first_row, end_row, column):
        """Start what the epilogue of the tile will need. Called before its products."""

    @cute.jit
    def finish_tile(self, state, acc, first_row, end_row, column):
        """Turn ``acc`` into outputs. Rows from ``end_row`` on, and columns past the last, are not stored."""
        if const_expr(self.tile.epilogues == 1):
            cute.arch.barrier(barrier_id=_TURN + state.consumer, number_of_threads=2 * _WARPGROUP)
        self._store_tile(state, acc, first_row, end_row, column)
        if const_expr(self.tile.epilogues == 1):
            if state.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.give_turn(state.consumer)

    @cute.jit
    def give_turn(self, consumer):
        """Let the other warpgroup use the slots, if they are shared; the second does so once at the start."""
        if const_expr(self.tile.epilogues == 1):
            cute.arch.barrier_arrive(barrier_id=_TURN + 1 - consumer, number_of_threads=2 * _WARPGROUP)

    @cute.jit
    def _store_tile(self, state, acc, first_row, end_row, column):
        (out,) = state.views
        where = (self._rows(out, first_row, end_row), end_row)
        tRS_sStore = state.copy_store.get_slice(state.in_group).partition_D(state.sStore)
        for s in cutlass.range_constexpr(self.sub_tiles):
            slot = (s % self.tile.store_sets) * self.num_stored
            self._open_set(state)
            for n, m in self._chunks(acc):
                values = cute.make_rmem_tensor(((8, 1),), self.dtype)
                for j in cutlass.range_constexpr(8):
                    values[j] = acc[self._element(s, n, m, j)].to(self.dtype)
                cute.copy(state.copy_store, values, tRS_sStore[None, m, n, slot])
            self._close_set(state)
            if state.is_store_warp:
                self._store(out, state.sStore, slot, where, column * self.sub_tiles + s)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def end(self, state):
        """Wait until everything is stored."""
        if state.is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _rows(self, view: TmaView, first_row: Int32, end_row: Int32) -> Int32:
        return store_origin(view.tensor.shape[0], first_row, end_row)

    def _chunks(self, acc: cute.Tensor) -> list[tuple[int, int]]:
        """Return the 16-column and 64-row blocks of a sub-tile."""
        blocks = cute.size(acc, mode=[1])
        return [(n, m) for n in range(self.tile.store_columns // 16) for m in range(blocks)]

    def _element(self, s: int, n: int, m: int, j: int, half: int = 0) -> tuple:
        """Return where in the accumulators the j-th of the 8 values lies that stmatrix takes of a chunk.

        The second half's columns lie half a tile on, in the same thread.
        """
        column8 = (s * self.tile.store_columns + half * self.columns) // 8 + 2 * n + j // 4
        return ((j % 2, (j // 2) % 2, column8), m, 0)

    @cute.jit
    def _open_set(self, state):
        """Make sure that the slots to be written have been read. With several sets, ``_close_set`` already has."""
        if const_expr(self.tile.store_sets == 1):
            if state.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._sync(state)

    @cute.jit
    def _close_set(self, state):
        """Make the slots visible to TMA, and those of the next set free."""
        if const_expr(self.tile.store_sets > 1):
            if state.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(self.tile.store_sets - 2, read=True)
        self._publish(state)

    @cute.jit
    def _publish(self, state):
        """Make what the warpgroup wrote to shared memory visible to its store warp's TMA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync(state)

    @cute.jit
    def _sync(self, state):
        cute.arch.barrier(barrier_id=_BARRIER + state.consumer, number_of_threads=_WARPGROUP)

    @cute.jit
    def _store(self, view, slots, slot, where, column, half=None):
        """Store one slot at sub-tile ``column``; ``half`` picks gate or up where the view has both. The store warp."""
        row, end_row = where
        # By offset, not by tile: where all columns fit one box, the mode of tiles has size 1 and CuTe drops its index,
        # so that sub-tiles past the last column would be stored over the first instead of being clipped.
        first_column = column * self.tile.store_columns
        if const_expr(half is None):
            tensor = cute.domain_offset((row, first_column, 0), view.tensor)
            gOut = cute.local_tile(tensor, self.box, (0, 0, end_row))
        else:
            tensor = cute.domain_offset((row, first_column, 0, 0), view.tensor)
            gOut = cute.local_tile(tensor, self.box, (0, 0, half, end_row))
        src, dst = cpasync.tma_partition(
            view.atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        cute.copy(view.atom, src[None, slot], dst)


class SwiGLUEpilogue(StoreEpilogue):
    """Stores a = silu(gate)·up, and unless for inference h = [gate | up]: up."""

    def __init__(self, *, dtype: type[cutlass.Numeric], tile: TileConfig, column_tiles: int, stores_h: bool) -> None:
        super().__init__(dtype=dtype, tile=tile, column_tiles=column_tiles, halves=2)
        self.stores_h = stores_h
        self.num_stored = 3 if stores_h else 1

    def views(self, tensors: tuple[cute.Tensor, ...]) -> tuple:
        """Return the stores of a, and of h as (R, N, 2, R + 1)."""
        if const_expr(self.stores_h):
            h, a = tensors
            return self.store_view(stores_end_at_row(a)), self.store_view(stores_end_at_row(halves_apart(h)))
        (a,) = tensors
        return (self.store_view(stores_end_at_row(a)),)

    @cute.jit
    def _store_tile(self, state, acc, first_row, end_row, column):
        """Turn gate and up accumulators, which lie in the same thread, into a and h."""
        out_a = state.views[0]
        where = (self._rows(out_a, first_row, end_row), end_row)
        tRS_sStore = state.copy_store.get_slice(state.in_group).partition_D(state.sStore)
        for s in cutlass.range_constexpr(self.sub_tiles):
            slot = (s % self.tile.store_sets) * self.num_stored
            self._open_set(state)
            for n, m in self._chunks(acc):
                a = cute.make_rmem_tensor(((8, 1),), self.dtype)
                gates = cute.make_rmem_tensor(((8, 1),), self.dtype)
                ups = cute.make_rmem_tensor(((8, 1),), self.dtype)
                for j in cutlass.range_constexpr(8):
                    gate, up = acc[self._element(s, n, m, j)], acc[self._element(s, n, m, j, half=1)]
                    a[j] = swiglu_point(gate, up).to(self.dtype)
                    gates[j], ups[j] = gate.to(self.dtype), up.to(self.dtype)
                cute.copy(state.copy_store, a, tRS_sStore[None, m, n, slot])
                if const_expr(self.stores_h):
                    cute.copy(state.copy_store, gates, tRS_sStore[None, m, n, slot + 1])
                    cute.copy(state.copy_store, ups, tRS_sStore[None, m, n, slot + 2])
            self._close_set(state)
            if state.is_store_warp:
                at = column * self.sub_tiles + s
                self._store(out_a, state.sStore, slot, where, at)
                if const_expr(self.stores_h):
                    self._store(state.views[1], state.sStore, slot + 1, where, at, half=0)
                    self._store(state.views[1], state.sStore, slot + 2, where, at, half=1)
                cute.arch.cp_async_bulk_commit_group()


class SwiGLUBackwardEpilogue(StoreEpilogue):
    """Turns da/score into dh, score·a and a part of dscore, from h that TMA loads meanwhile: down_backward.

    dh is written over h in shared memory: a thread reads and writes the same places. Each column tile writes its own
    column of dscore's parts, so that their sum has one order. Sub-tiles of half the rows leave memory for the ring;
    of one's columns they come one after the other.
    """

    def __init__(self, *, dtype: type[cutlass.Numeric], tile: TileConfig, column_tiles: int) -> None:
        super().__init__(dtype=dtype, tile=tile, column_tiles=column_tiles)
        self.steps = self.sub_tiles * tile.row_blocks

    def views(self, tensors: tuple[cute.Tensor, ...]) -> tuple:
        """Return the stores of score·a and dh, the load of h, and the scores and dscore's parts as they are."""
        dh, scaled_a, dscore_parts, h, score = tensors
        layout = cute.slice_(self.load_layout(), (None, None, 0))
        load_h = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), halves_apart(h), layout, self.box)
        return (
            self.store_view(stores_end_at_row(scaled_a)),
            self.store_view(stores_end_at_row(halves_apart(dh))),
            TmaView(*load_h),
            score,
            dscore_parts,
        )

    @cute.jit
    def begin_tile(self, state, first_row, end_row, column):
        """Load h's first sub-tiles while the products run, if their slots are this warpgroup's own."""
        if const_expr(self.tile.epilogues == 2):
            if state.is_store_warp:
                self._load_first(state, first_row, column)

    @cute.jit
    def _load_first(self, state, first_row, column):
        """Load the first sub-tiles of h, once what the last tile stored from their slots has been read."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for s in cutlass.range_constexpr(self.tile.load_stages):
            self._load_h(state, first_row, column, s)

    def _load_phase(self, state, s):
        """Return the parity of sub-tile ``s``'s load. With slots in turn, the two warpgroups' loads alternate."""
        loads_per_tile = self.steps // self.tile.load_stages
        if loads_per_tile % 2 == 0:
            return (s // self.tile.load_stages) % 2
        return (state.consumer + s // self.tile.load_stages) % 2

    def _place(self, column, s):
        """Return which sub-tile of columns, in the whole output, and which block of rows ``s`` is."""
        return column * self.sub_tiles + s // self.tile.row_blocks, s % self.tile.row_blocks

    def _h_tile(self, state, first_row, column, s):
        at, block = self._place(column, s)
        origin = (first_row + block * self.box[0], at * self.tile.store_columns, 0)
        tensor = cute.domain_offset(origin, state.views[2].tensor)
        gH = cute.local_tile(tensor, self.box, (0, 0, None))
        return cpasync.tma_partition(
            state.views[2].atom,
            0,
            cute.make_layout(1),
            cute.group_modes(state.sLoad, 0, 2),
            cute.group_modes(gH, 0, 2),
        )

    @cute.jit
    def _load_h(self, state, first_row, column, s):
        stage = s % self.tile.load_stages
        barrier = state.loaded.get_barrier(state.first_loaded + stage)
        bytes_both = 2 * self.box[0] * self.box[1] * self.dtype.width // 8
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, bytes_both)
        dst, src = self._h_tile(state, first_row, column, s)
        for half in cutlass.range_constexpr(2):
            cute.copy(state.views[2].atom, src[None, half], dst[None, 2 * stage + half], tma_bar_ptr=barrier)

    @cute.jit
    def _store_tile(self, state, acc, first_row, end_row, column):
        """Turn ``acc`` (the gradient of a before its score) into the three outputs."""
        out_a, out_dh, _, score, dscore_parts = state.views
        if const_expr(self.tile.epilogues == 1):
            if state.is_store_warp:
                self._load_first(state, first_row, column)
        thread_store = state.copy_store.get_slice(state.in_group)
        tRS_sStore = thread_store.partition_D(state.sStore)
        tRS_sLoad = thread_store.partition_D(state.sLoad)
        tSR_sLoad = state.copy_load.get_slice(state.in_group).partition_S(state.sLoad)
        blocks = cute.size(acc, mode=[1])
        row_in_block = first_row + (state.in_group // 32) * 16 + (state.in_group % 32) // 4
        scores = cute.make_rmem_tensor((2 * blocks,), Float32)
        dscores = cute.make_rmem_tensor((2 * blocks,), Float32)
        for i in cutlass.range_constexpr(2 * blocks):
            row = row_in_block + (i % 2) * 8 + (i // 2) * 64
            scores[i] = score[cutlass.min(row, end_row - 1)]
            dscores[i] = Float32(0.0)
        for s in cutlass.range_constexpr(self.steps):
            slot = s % self.tile.store_sets
            stage = s % self.tile.load_stages
            state.loaded.wait(state.first_loaded + stage, self._load_phase(state, s))
            at, block = self._place(column, s)
            # Where sub-tiles have all rows, m counts their blocks of 64; else it is 0, and block says which one it is.
            for n, m in self._chunks(tRS_sStore):
                gates = cute.make_rmem_tensor(((8, 1),), self.dtype)
                ups = cute.make_rmem_tensor(((8, 1),), self.dtype)
                a = cute.make_rmem_tensor(((8, 1),), self.dtype)
                cute.copy(state.copy_load, tSR_sLoad[None, m, n, 2 * stage], gates)
                cute.copy(state.copy_load, tSR_sLoad[None, m, n, 2 * stage + 1], ups)
                for j in cutlass.range_constexpr(8):
                    i = 2 * (m + block) + (j // 2) % 2
                    da = acc[self._element(s // self.tile.row_blocks, n, m + block, j)]
                    grads = swiglu_backward_point(da * scores[i], gates[j].to(Float32), ups[j].to(Float32))
                    dscores[i] += da * grads.a
                    a[j] = (grads.a * scores[i]).to(self.dtype)
                    gates[j], ups[j] = grads.dgate.to(self.dtype), grads.dup.to(self.dtype)
                cute.copy(state.copy_store, gates, tRS_sLoad[None, m, n, 2 * stage])
                cute.copy(state.copy_store, ups, tRS_sLoad[None, m, n, 2 * stage + 1])
                cute.copy(state.copy_store, a, tRS_sStore[None, m, n, slot])
            reloads = 0 < s <= self.steps - self.tile.load_stages
            if const_expr(reloads or self.tile.store_sets <= s + 1 < self.steps):
                if state.is_store_warp:
                    # By now the last sub-tile has left its slots: h's next takes them, well before it is due.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    if const_expr(reloads):
                        self._load_h(state, first_row, column, s - 1 + self.tile.load_stages)
            self._publish(state)
            if state.is_store_warp:
                where = (self._rows(out_a, first_row + block * self.box[0], end_row), end_row)
                self._store(out_a, state.sStore, slot, where, at)
                self._store(out_dh, state.sLoad, 2 * stage, where, at, half=0)
                self._store(out_dh, state.sLoad, 2 * stage + 1, where, at, half=1)
                cute.arch.cp_async_bulk_commit_group()
        for i in cutlass.range_constexpr(2 * blocks):
            total = dscores[i]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            row = row_in_block + (i % 2) * 8 + (i // 2) * 64
            if row < end_row and state.in_group % 4 == 0 and column < self.column_tiles:
                dscore_parts[row, column] = total


class WeightGradEpilogue(StoreEpilogue):
    """Stores an expert's matrix, or adds it in fp32; ``end_row`` is the expert, ``first_row`` a row of its matrix.

    A set of sub-tiles is written as one: what it waits for is the set before it, which with all sub-tiles in one set
    has left during the products. The engine that stores is also the one that adds, so that no sum is loaded: every
    element is added to by one block, once, which repeats bit for bit.
    """

    def __init__(self, *, dtype: type[cutlass.Numeric], tile: TileConfig, column_tiles: int, accumulates: bool) -> None:
        super().__init__(dtype=dtype, tile=tile, column_tiles=column_tiles)
        self.accumulates = accumulates
        self.store_dtype = Float32 if accumulates else dtype

    # ---- host

    def store_layout(self) -> cute.ComposedLayout:
        """Return the layout of all slots: (rows, columns, slots)."""
        slots = self.tile.epilogues * self.tile.store_sets
        return sm90.make_smem_layout_epi(self.store_dtype, LayoutEnum.ROW_MAJOR, self.box, slots)

    def views(self, tensors: tuple[cute.Tensor, ...]) -> tuple:
        """Return the store of the gradient (E, X, Y) as (X, Y, E)."""
        (grad,) = tensors
        grad_XYE = cute.make_tensor(grad.iterator, cute.select(grad.layout, mode=[1, 2, 0]))
        return (self.store_view(grad_XYE),)

    def store_view(self, rows: cute.Tensor) -> TmaView:
        """Return the TMA store, or addition, of one sub-tile of ``rows``."""
        adds, stores = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
        layout = cute.slice_(self.store_layout(), (None, None, 0))
        return TmaView(*cpasync.make_tiled_tma_atom(adds if self.accumulates else stores, rows, layout, self.box))

    # ---- device

    @cute.jit
    def start(self, views, sStore, sLoad, mma, loaded, in_group, warp, consumer):
        """Return the state for a thread of ``consumer``."""
        state = StoreEpilogue.start(self, views, sStore, sLoad, mma, loaded, in_group, warp, consumer)
        if const_expr(self.accumulates):
            state = state._replace(copy_store=copy_of_fp32(mma, self.dtype))
        return state

    @cute.jit
    def _store_tile(self, state, acc, first_row, end_row, column):
        (out,) = state.views
        where = (first_row, end_row)
        sets = self.tile.store_sets
        tRS_sStore = state.copy_store.get_slice(state.in_group).partition_D(state.sStore)
        for first in cutlass.range_constexpr(0, self.sub_tiles, sets):
            if state.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._sync(state)
            for slot in cutlass.range_constexpr(sets):
                for n, m in self._chunks(acc):
                    place = tRS_sStore[None, m, n, slot]
                    values = cute.make_rmem_tensor(place.shape, self.store_dtype)
                    for j in cutlass.range_constexpr(8):
                        values[j] = acc[self._element(first + slot, n, m, j)].to(self.store_dtype)
                    cute.copy(state.copy_store, values, place)
            self._publish(state)
            if state.is_store_warp:
                for slot in cutlass.range_constexpr(sets):
                    self._store(out, state.sStore, slot, where, column * self.sub_tiles + first + slot)
                cute.arch.cp_async_bulk_commit_group()


def copy_of_fp32(mma: cute.TiledMma, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
    """Return the copy of accumulators as they are, two neighbours at a time; stmatrix takes 16-bit values only.

    A thread's values of a chunk come in the order that stmatrix has.
    """
    ownership = cute.make_tiled_copy_C_atom(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), dtype), mma)
    return cute.make_tiled_copy_S(cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64), ownership)


def halves_apart(h: cute.Tensor) -> cute.Tensor:
    """Return h (R, 2N), whose rows are [gate | up], as (R, N, 2)."""
    num_rows, width = h.shape
    half = width // 2
    return cute.make_tensor(h.iterator, cute.make_layout((num_rows, half, 2), stride=(h.stride[0], 1, half)))


def make_epilogue(
    form: KernelForm, *, dtype: type[cutlass.Numeric], tile: TileConfig, column_tiles: int
) -> StoreEpilogue:
    """Return the epilogue of ``form``."""
    match form:
        case KernelForm.up | KernelForm.up_inference:
            stores_h = form is KernelForm.up
            return SwiGLUEpilogue(dtype=dtype, tile=tile, column_tiles=column_tiles, stores_h=stores_h)
        case KernelForm.down_backward:
            return SwiGLUBackwardEpilogue(dtype=dtype, tile=tile, column_tiles=column_tiles)
        case _ if form.is_weight_grad:
            return WeightGradEpilogue(dtype=dtype, tile=tile, column_tiles=column_tiles, accumulates=form.accumulates)
        case _:
            return StoreEpilogue(dtype=dtype, tile=tile, column_tiles=column_tiles)
