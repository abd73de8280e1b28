"""Index maps and arithmetic that the kernels share, compiled for the host and run on CPU tensors."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from moe_kernels.cute.common.ring import advance, next_stage, skip
from moe_kernels.cute.common.scheduler import CLUSTER, place_unit, units_of
from moe_kernels.cute.common.swiglu import swiglu_backward_point, swiglu_point
from moe_kernels.cute.common.views import load_origin, store_origin

TILE_ROWS = 128


def run(function, *tensors):
    """Compile ``function`` for the host and run it on CPU tensors."""
    arguments = [from_dlpack(tensor) for tensor in tensors]
    cute.compile(function, *arguments)(*arguments)


@cute.jit
def all_places(rows_C: cute.Tensor, num_units_C: cute.Tensor, places: cute.Tensor, columns: cutlass.Constexpr):
    """For each row count: its number of units, and (row tile, column, is alone) for every unit and rank."""
    for case in cutlass.range(rows_C.shape[0]):
        units = units_of(rows_C[case], columns, TILE_ROWS)
        num_units_C[case] = units
        for unit in cutlass.range(units):
            for rank in cutlass.range_constexpr(CLUSTER):
                place = place_unit(unit, rows_C[case], Int32(rank), columns, TILE_ROWS)
                places[case, unit, rank, 0] = place.row_tile
                places[case, unit, rank, 1] = place.column
                places[case, unit, rank, 2] = Int32(1) if place.is_alone else Int32(0)


@pytest.mark.parametrize("columns", [1, 2, 3, 8, 23])
def test_units_cover_every_tile_of_an_expert_once_and_no_tile_of_padding(columns):
    counts = [0, 1, 127, 128, 129, 256, 257, 640, 1000]
    num_units = torch.full((len(counts),), -1, dtype=torch.int32)
    places = torch.full((len(counts), 8 * columns, CLUSTER, 3), -1, dtype=torch.int32)

    @cute.jit
    def program(rows: cute.Tensor, units: cute.Tensor, out: cute.Tensor):
        all_places(rows, units, out, columns)

    run(program, torch.tensor(counts, dtype=torch.int32), num_units, places)
    for case, rows in enumerate(counts):
        row_tiles = -(-rows // TILE_ROWS)
        used = places[case, : num_units[case]]
        seen = [(row, column) for row, column, _ in used.flatten(0, 1).tolist() if column < columns]
        assert sorted(seen) == [(row, column) for row in range(row_tiles) for column in range(columns)]
        # Only the last row tile's last column, if both counts are odd, leaves a CTA without a tile.
        assert CLUSTER * num_units[case] - len(seen) == (row_tiles % 2) * (columns % 2)
        for first, second in used.tolist():
            assert first[2] == second[2]
            if first[2]:
                assert (second[0], second[1]) == (first[0], first[1] + 1)
            else:
                assert (second[0], second[1]) == (first[0] + 1, first[1])


@pytest.mark.parametrize(("stages", "count"), [(4, 1), (4, 24), (5, 4), (5, 24), (6, 7)])
def test_a_ring_skipped_is_a_ring_walked(stages, count):
    out = torch.full((20, 5), -1, dtype=torch.int32)

    @cute.jit
    def program(out: cute.Tensor):
        stage, phase, skipped, skipped_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(20):
            for _ in cutlass.range(count):
                out[i, 4] = next_stage(stage, stages)
                stage, phase = advance(stage, phase, stages)
            skipped, skipped_phase = skip(skipped, skipped_phase, count, stages)
            out[i, 0] = stage
            out[i, 1] = phase
            out[i, 2] = skipped
            out[i, 3] = skipped_phase

    run(program, out)
    for i, row in enumerate(out.tolist()):
        turns, stage = divmod((i + 1) * count, stages)
        assert row == [stage, turns % 2, stage, turns % 2, stage]


def test_swiglu_and_its_gradients_are_torchs_to_the_hardware_tanhs_error():
    generator = torch.Generator().manual_seed(0)
    gate, up, da = (3 * torch.randn(512, generator=generator) for _ in range(3))
    out = torch.full((4, 512), float("nan"))

    @cute.jit
    def program(gate: cute.Tensor, up: cute.Tensor, da: cute.Tensor, out: cute.Tensor):
        for i in cutlass.range(512):
            grads = swiglu_backward_point(Float32(da[i]), Float32(gate[i]), Float32(up[i]))
            out[0, i] = swiglu_point(Float32(gate[i]), Float32(up[i]))
            out[1, i] = grads.a
            out[2, i] = grads.dgate
            out[3, i] = grads.dup

    run(program, gate, up, da, out)
    wide_gate, wide_up = gate.double().requires_grad_(), up.double().requires_grad_()
    a = F.silu(wide_gate) * wide_up
    dgate, dup = torch.autograd.grad(a, (wide_gate, wide_up), da.double())
    # On the host tanh is exact to fp32; on the GPU it errs by 2^-11, which the GPU tests cover.
    for actual, truth in zip(out, (a, a, dgate, dup), strict=True):
        assert torch.allclose(actual.double(), truth.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "end", "num_rows"), [(0, 1, 1), (5, 133, 4096), (2**30, 2**30 + 7, 2**31 - 9)])
@pytest.mark.parametrize("stride", [8, 200, 14336])
def test_moved_coordinates_name_the_segments_rows_and_clip_at_its_end(first, end, num_rows, stride):
    out = torch.full((2, 4), -1, dtype=torch.int64)

    @cute.jit
    def program(bounds: cute.Tensor, out: cute.Tensor):
        first_row, end_row, rows = Int32(bounds[0]), Int32(bounds[1]), Int32(bounds[2])
        _, row, wrap, end = load_origin(first_row, end_row, stride)
        out[0, 0] = cutlass.Int64(row)
        out[0, 1] = cutlass.Int64(wrap)
        out[0, 2] = cutlass.Int64(end)
        out[0, 3] = cutlass.Int64(store_origin(rows, first_row, end_row))

    run(program, torch.tensor([first, end, num_rows], dtype=torch.int32), out)
    row, wrap, end_coordinate, store_row = out[0].tolist()
    assert row + (end - first) == 2**30  # the first row that is not the segment's is the first out of bounds
    assert store_row + (end - first) == num_rows
    elements = row * stride + wrap * 2**33 + end_coordinate * stride
    assert (elements - first * stride) * 2 % 2**64 == 0
    assert (store_row - num_rows + end) * stride == first * stride
