"""How parameters get into the buffer that is gathered, and gradients into the one that a reduce-scatter sums.

torch's operators for both cut large tensors into many short launches, and the second makes a table of its copies on the
host at every call (docs/performance.md). Copies of whole rows need neither. Who calls: parallel.py.
"""

import torch
from torch import Tensor

from training.on_triton import runs_triton

_WORTH_A_LAUNCH = 1 << 22  # values of a row's part from which it is copied alone


def gather_in(
    all_gather_inputs: list[Tensor], all_gather_output: Tensor, inp_split_sizes: list[int], numel: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Write the inputs, all of one dtype, side by side into this process's part of ``all_gather_output``.

    Returns that part, ``numel`` values, and the whole.
    """
    own = all_gather_output.narrow(0, numel * rank, numel)
    with torch.no_grad():
        copy_rows(list(own.view(1, -1).split(inp_split_sizes, dim=1)), [t.view(1, -1) for t in all_gather_inputs])
    return own, all_gather_output


def scatter_in(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Write into ``out`` what ``torch._chunk_cat`` does: chunk r of every tensor, side by side, into row r.

    ``out`` is (num_chunks, values of all tensors' chunks) and contiguous; values are cast to its dtype. Tensors that do
    not divide by ``num_chunks`` are padded with zeros, by torch's operator.
    """
    if dim != 0 or not all(tensor.is_contiguous() and tensor.shape[0] % num_chunks == 0 for tensor in tensors):
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
        return
    chunked = [tensor.view(num_chunks, -1) for tensor in tensors]
    copy_rows(list(out.split([chunks.shape[1] for chunks in chunked], dim=1)), chunked)


def copy_rows(places: list[Tensor], sources: list[Tensor]) -> None:
    """Copy contiguous matrices into places of the same shapes whose rows may lie apart."""
    small_places: list[Tensor] = []
    small_rows: list[Tensor] = []
    for place, source in zip(places, sources, strict=True):
        if source.shape[1] < _WORTH_A_LAUNCH:
            small_places += place.unbind()
            small_rows += source.unbind()
        elif source.dtype == place.dtype or not runs_triton(source):
            for row, values in zip(place.unbind(), source.unbind(), strict=True):
                row.copy_(values)
        else:
            from training.cast_rows import cast_rows  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

            cast_rows(source, place)
    if small_rows:
        torch._foreach_copy_(small_places, small_rows)
