"""Views of packed rows whose TMA transfers stop at an expert's last row, though the next expert's rows lie behind it.

One descriptor serves all experts. An added mode moves the base address, so that the end of the segment in question is
where the row extent ends; the copy engine clips there. Source: quack (Dao-AILab), "ragged" TMA tensors.
"""
# mypy: disable-error-code="import-not-found"

from cutlass import Int32, Int64, cute

# A row stride of 2^33 elements of two bytes, 2^30 times, is 2^64 bytes: addresses wrap round to where they began.
_LOAD_EXTENT = 1 << 30
_WRAP_STRIDE = 1 << 33


def stores_end_at_row(rows: cute.Tensor) -> cute.Tensor:
    """Return (R, ..., R + 1): at [R - n + i, ..., end] lies row end - n + i; rows from ``end`` on are out of bounds.

    ``rows`` is (R, ...) with a row stride that is a multiple of 16 bytes. The base lies a whole tensor before
    ``rows``: every address that is in bounds and used lies inside of it.
    """
    num_rows, row_stride = rows.shape[0], rows.stride[0]
    base = rows.iterator - cute.assume(Int64(row_stride) * num_rows, divby=8)
    shape = (*rows.shape, num_rows + 1)
    return cute.make_tensor(base, cute.make_layout(shape, stride=(*rows.stride, row_stride)))


def store_origin(num_rows: Int32, first_row: Int32, end_row: Int32) -> Int32:
    """Return the row coordinate of ``first_row`` in ``stores_end_at_row``, where the last mode is at ``end_row``."""
    return num_rows - (end_row - first_row)


def loads_end_at_row(rows: cute.Tensor) -> cute.Tensor:
    """Return (C, 2^30, 2^30, R + 1) over ``rows`` (R, C): rows from the segment's end on load as zeros.

    For loads a moved base faults, hence the wrap-around mode. Coordinates: ``load_origin``.
    """
    num_rows, width = rows.shape
    row_stride = rows.stride[0]
    shape = (width, _LOAD_EXTENT, _LOAD_EXTENT, num_rows + 1)
    stride = (1, row_stride, Int64(_WRAP_STRIDE), row_stride)
    return cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=stride))


def load_origin(first_row: Int32, end_row: Int32, row_stride: int) -> tuple[int, Int32, Int32, Int32]:
    """Return the coordinates in ``loads_end_at_row`` of column 0 of ``first_row`` in the segment up to ``end_row``."""
    length = end_row - first_row
    return 0, _LOAD_EXTENT - length, Int32(_LOAD_EXTENT - row_stride // 8), end_row
