"""What a benchmark divides by: counted operations and bytes, and the peers' layout of the same weights."""

import pytest
import torch

from benchmarks.peers import interleave
from benchmarks.shapes import SHAPES, MoEShape, work_of


@pytest.mark.parametrize("name", SHAPES)
def test_products_add_up_to_6_and_12_times_rows_D_N(name):
    shape = SHAPES[name]
    rows = shape.T * shape.K
    flops = {op: work.flops for op, work in work_of(shape, rows).items()}
    unit = rows * shape.D * shape.N
    assert flops["up"] + flops["down"] == 6 * unit
    assert flops["down_backward"] + flops["dw_down"] + flops["dw_gate_up"] + flops["dx"] == 12 * unit


def test_bytes_of_a_small_layer_counted_by_hand():
    T, D, N, E, rows = 4, 16, 8, 2, 6
    work = work_of(MoEShape(T, D, N, E, K=2), rows)
    x, w_gate_up, w_down, h, a, y = T * D, E * 2 * N * D, E * D * N, rows * 2 * N, rows * N, rows * D
    assert work["up"].bytes == 2 * (x + w_gate_up + h + a)
    assert work["down"].bytes == 2 * (a + w_down + y)
    assert work["down_backward"].bytes == 2 * (x + w_down + h + h + a)
    assert work["dw_gate_up"].bytes == 2 * (h + x + w_gate_up)
    assert work["dx"].bytes == 2 * (h + w_gate_up + y)
    assert work["combine"].bytes == work["sum"].bytes == 2 * (y + x)


def test_interleaving_puts_each_gate_row_before_its_up_row():
    w_gate_up = torch.arange(2 * 6).view(2, 6, 1)
    assert interleave(w_gate_up).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
