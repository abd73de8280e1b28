"""Rows copied into places that lie apart, in another dtype, and rows added up: torch's cast goes value by value.

Needs triton, which CUDA builds of torch bring.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # values of one program: with 128 threads, 16 bytes a load and several loads in flight


def cast_rows(source_RX: Tensor, target_RX: Tensor) -> None:
    """Write ``source_RX``, contiguous, into ``target_RX``, whose rows are contiguous, in their dtype."""
    rows, width = source_RX.shape
    grid = (triton.cdiv(width, _BLOCK), rows)
    _cast_rows[grid](source_RX, target_RX, width, target_RX.stride(0), BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _cast_rows(source_RX, target_RX, width, target_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(source_RX + row * width + at, mask=inside)
    tl.store(target_RX + row * target_stride + at, values.to(target_RX.dtype.element_ty), mask=inside)


def add_rows(rows_RX: Tensor, out_X: Tensor) -> None:
    """Write into ``out_X`` the sum of the contiguous ``rows_RX`` in its dtype, the first row first."""
    rows, width = rows_RX.shape
    _add_rows[(triton.cdiv(width, _BLOCK),)](rows_RX, out_X, width, ROWS=rows, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _add_rows(rows_RX, out_X, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.load(rows_RX + at, mask=inside).to(out_X.dtype.element_ty)
    for _ in tl.static_range(1, ROWS):
        rows_RX += width
        total += tl.load(rows_RX + at, mask=inside).to(out_X.dtype.element_ty)
    tl.store(out_X + at, total, mask=inside)
