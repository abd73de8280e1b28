"""The epilogue of the weight gradients: a tile of one expert's matrix, stored or added to fp32 by the copy engine.

How sub-tiles are stored is epilogue.py; the products are weight_grad.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, const_expr, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum

from moe_kernels.cute.sm90.epilogue import StoreEpilogue, TmaView
from moe_kernels.cute.tiles import TileConfig


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
