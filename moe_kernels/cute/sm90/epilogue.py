"""What happens to a tile of accumulators before it reaches memory: the class that stores it, on which the others build.

A consumer warpgroup works alone, with slots of shared memory of its own or (ping-pong) in its turn. It turns its
accumulators into values 16 x 16 at a time and stores them with stmatrix into a sub-tile; its first warp hands finished
sub-tiles to TMA, which clips them at the expert's last row (common/views.py). A set of slots holds the sub-tiles that
leave together. The others: swiglu_epilogue.py, weight_grad_epilogue.py. Who calls: grouped_gemm.py, weight_grad.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

from typing import Any, NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum

from moe_kernels.cute.common.views import store_origin, stores_end_at_row
from moe_kernels.cute.sm90.block import SLOTS_TURN, SLOTS_WRITTEN, WARPGROUP
from moe_kernels.cute.tiles import TileConfig


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
            cute.arch.barrier(barrier_id=SLOTS_TURN + state.consumer, number_of_threads=2 * WARPGROUP)
        self._store_tile(state, acc, first_row, end_row, column)
        if const_expr(self.tile.epilogues == 1):
            if state.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.give_turn(state.consumer)

    @cute.jit
    def give_turn(self, consumer):
        """Let the other warpgroup use the slots, if they are shared; the second does so once at the start."""
        if const_expr(self.tile.epilogues == 1):
            cute.arch.barrier_arrive(barrier_id=SLOTS_TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)

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
        cute.arch.barrier(barrier_id=SLOTS_WRITTEN + state.consumer, number_of_threads=WARPGROUP)

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
