"""How gradients get into the buffer that a reduce-scatter sums: a row for each process, gradient beside gradient.

torch's own operator makes a table of its copies on the host at every call, and its kernel runs far below the memory's
rate (docs/performance.md). Copies of whole rows need neither. Who calls: parallel.py.
"""

import torch
from torch import Tensor

_WORTH_A_LAUNCH = 1 << 20  # values of a row's part from which it is copied alone


def copy_in(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Write into ``out`` what ``torch._chunk_cat`` does: chunk r of every tensor, side by side, into row r.

    ``out`` is (num_chunks, values of all tensors' chunks) and contiguous; values are cast to its dtype. Tensors that do
    not divide by ``num_chunks`` are padded with zeros, by torch's operator.
    """
    if dim != 0 or not all(tensor.is_contiguous() and tensor.shape[0] % num_chunks == 0 for tensor in tensors):
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
        return
    chunked = [tensor.view(num_chunks, -1) for tensor in tensors]
    places = out.split([chunks.shape[1] for chunks in chunked], dim=1)
    small_places: list[Tensor] = []
    small_chunks: list[Tensor] = []
    for chunks, place in zip(chunked, places, strict=True):
        if chunks.shape[1] >= _WORTH_A_LAUNCH:
            for chunk, row in zip(chunks.unbind(), place.unbind(), strict=True):
                row.copy_(chunk)
        else:
            small_places += place.unbind()
            small_chunks += chunks.unbind()
    if small_chunks:
        torch._foreach_copy_(small_places, small_chunks)
