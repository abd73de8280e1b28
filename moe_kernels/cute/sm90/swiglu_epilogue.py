"""The epilogues of up and down_backward: SwiGLU between accumulators of one thread, and its gradient from h in memory.

How sub-tiles are stored is epilogue.py; the arithmetic of one element is common/swiglu.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def, valid-type, attr-defined"

import cutlass
from cutlass import Float32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from moe_kernels.cute.common.swiglu import swiglu_backward_point, swiglu_point
from moe_kernels.cute.common.views import stores_end_at_row
from moe_kernels.cute.sm90.epilogue import StoreEpilogue, TmaView
from moe_kernels.cute.tiles import TileConfig


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


def halves_apart(h: cute.Tensor) -> cute.Tensor:
    """Return h (R, 2N), whose rows are [gate | up], as (R, N, 2)."""
    num_rows, width = h.shape
    half = width // 2
    return cute.make_tensor(h.iterator, cute.make_layout((num_rows, half, 2), stride=(h.stride[0], 1, half)))
