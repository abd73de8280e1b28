"""Index maps and arithmetic that the kernels share, compiled for the host and run on CPU tensors."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import make_smem_layout_a

from moe_kernels.cute.common import scheduler
from moe_kernels.cute.common.longest_first import Cursor, look, nth_member
from moe_kernels.cute.common.ring import advance, next_stage, skip
from moe_kernels.cute.common.scheduler import CLUSTER, ExpertByExpert, place_unit, units_of
from moe_kernels.cute.common.swiglu import swiglu_backward_point, swiglu_point
from moe_kernels.cute.common.views import load_origin, store_origin
from moe_kernels.cute.sm90.block import CHUNK, GATHER_WARPS, LOADER_WARP
from moe_kernels.cute.sm90.gather import Pieces
from moe_kernels.cute.tiles import ELEMENT_BYTES, TILE_DEPTH

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


@cute.jit
def all_numbers(size_E: cute.Tensor, found: cute.Tensor, units: cutlass.Constexpr):
    """For each number: the expert and the unit within it, as a warp finds them whose 32 lanes take turns here."""
    num_experts, largest = size_E.shape[0], Int32(-1)
    for expert in cutlass.range(num_experts):
        largest = cutlass.max(largest, size_E[expert])
    cursor = Cursor(largest, Int32(-1), Int32(0), Int32(0))
    for number in cutlass.range(found.shape[0]):
        members, is_found = Int32(0), Boolean(False)
        while not is_found and cursor.size >= 0:
            members, smaller = Int32(0), Int32(-1)
            for lane in cutlass.range(32):
                expert = cursor.window + lane
                size = size_E[cutlass.min(expert, num_experts - 1)] if expert < num_experts else Int32(-1)
                if size == cursor.size:
                    members |= Int32(1) << lane
                if size < cursor.size:
                    smaller = cutlass.max(smaller, size)
            is_found, cursor = look(number, cursor, members, smaller, num_experts, units)
        if is_found:
            index = (number - cursor.before) // units
            found[number, 0] = cursor.window + nth_member(members, index)
            found[number, 1] = number - cursor.before - index * units


@pytest.mark.parametrize("num_experts", [1, 5, 32, 33, 128])
@pytest.mark.parametrize("units", [1, 6])
def test_units_come_by_size_class_the_largest_first_and_each_once(num_experts, units):
    generator = torch.Generator().manual_seed(num_experts)
    size_E = torch.randint(-1, 6, (num_experts,), generator=generator, dtype=torch.int32)  # -1 is left out
    size_E[size_E == 3] = 4  # a class that no expert has
    size_E[-1] = 9
    found = torch.full((units * num_experts + 2, 2), -1, dtype=torch.int32)

    @cute.jit
    def program(size_E: cute.Tensor, found: cute.Tensor):
        all_numbers(size_E, found, units)

    run(program, size_E, found)
    experts = sorted((e for e in range(num_experts) if size_E[e] >= 0), key=lambda e: (-int(size_E[e]), e))
    expected = [[expert, unit] for expert in experts for unit in range(units)]
    assert found[: len(expected)].tolist() == expected
    assert bool((found[len(expected) :] == -1).all())


@pytest.mark.parametrize("step", [1, 3])
def test_a_warp_finds_units_expert_by_expert_and_behind_the_last_how_many_there_are(monkeypatch, step):
    """The warp is of one lane, because the host has no others: its windows are one expert wide."""
    for name, function in {
        "lane_idx": lambda: Int32(0),
        "shuffle_sync": lambda value, lane: value,
        "shuffle_sync_up": lambda value, distance, mask_and_clamp: value,
        "vote_ballot_sync": Int32,
    }.items():
        monkeypatch.setattr(cute.arch, name, function)
    monkeypatch.setattr(scheduler, "_WARP", 1)
    offsets = [0, 0, 1, 300, 300, 300, 556, 900, 900]
    order = ExpertByExpert(columns=3, tile_rows=TILE_ROWS)
    expected = []
    for expert, (first, end) in enumerate(pairwise(offsets)):
        tiles = -(-(end - first) // TILE_ROWS)
        expected += [[expert, unit, first, end] for unit in range(tiles // 2 * 3 + tiles % 2 * 2)]
    found = torch.full((-(-len(expected) // step) + 2, 5), -1, dtype=torch.int32)

    @cute.jit
    def program(offsets: cute.Tensor, found: cute.Tensor):
        cursor = order.start(offsets)
        for i in cutlass.range(found.shape[0]):
            work, cursor = order.find(i * step, cursor, offsets)
            for field in cutlass.range_constexpr(4):
                found[i, field] = work[field]
            found[i, 4] = cursor.before

    run(program, torch.tensor(offsets, dtype=torch.int32), found)
    numbered = expected[::step]
    assert found[: len(numbered), :4].tolist() == numbered
    assert (found[len(numbered) :, 0] == -1).all()
    assert (found[len(numbered) :, 4] == len(expected)).all()


@pytest.mark.parametrize(("rows", "width"), [(128, 64), (64, 64), (64, 128), (64, 256)])
def test_warps_copy_every_chunk_of_a_stage_once_to_where_the_products_read_it(rows, width):
    pieces = Pieces(rows, width)
    across = width > TILE_DEPTH or rows == TILE_DEPTH  # the operand of a weight gradient
    expected = torch.full((rows, width // CHUNK), -1, dtype=torch.int32)
    actual = torch.full((GATHER_WARPS, 32, pieces.passes, 3), -1, dtype=torch.int32)

    @cute.jit
    def program(expected: cute.Tensor, actual: cute.Tensor):
        shape = (width, 128, rows) if across else (rows, 128, width)
        order = LayoutEnum.COL_MAJOR if across else LayoutEnum.ROW_MAJOR
        layout = make_smem_layout_a(order, shape, cutlass.BFloat16, 1).outer
        for row in cutlass.range(rows):
            for chunk in cutlass.range(width // CHUNK):
                at = (chunk * CHUNK, row, 0) if across else (row, chunk * CHUNK, 0)
                byte = ELEMENT_BYTES * Int32(cute.crd2idx(at, layout))
                expected[row, chunk] = (byte ^ (((byte >> 7) & 7) << 4)) // ELEMENT_BYTES  # the 128-byte swizzle
        for warp in cutlass.range(GATHER_WARPS):
            for lane in cutlass.range(32):
                places = pieces.places(warp + LOADER_WARP, lane)
                for i in cutlass.range_constexpr(pieces.passes):
                    actual[warp, lane, i, 0] = pieces.first_row(warp + LOADER_WARP, lane) + i * pieces.row_step
                    actual[warp, lane, i, 1] = pieces.chunk(lane)
                    actual[warp, lane, i, 2] = pieces.offset(places, i)

    run(program, expected, actual)
    copied = [tuple(copy) for copy in actual.flatten(0, 2).tolist() if copy[0] < rows]
    assert sorted(copied) == [(r, c, int(expected[r, c])) for r in range(rows) for c in range(width // CHUNK)]


def test_fp32_accumulators_reach_their_places():
    script = Path(__file__).with_name("run_copy_of_fp32.py")
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": str(script.parents[3])}
    subprocess.run([sys.executable, str(script)], check=True, env=environment)
