"""Runs the copy of fp32 accumulators to a sub-tile on the CPU, each thread in turn, and asserts where values end up.

A process of its own, because the compiler reads its target when it is imported: the tensor cores' layout is Hopper's.
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import BFloat16, Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from moe_kernels.cute.sm90.weight_grad_epilogue import copy_of_fp32


@cute.jit
def copy_all(out: cute.Tensor, tile_columns: cutlass.Constexpr):
    """Write each accumulator's row-major place in ``out`` through the copy of the thread that owns it."""
    major = OperandMajorMode.MN
    mma = sm90.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (64, tile_columns))
    copy = copy_of_fp32(mma, BFloat16)
    rows, columns = out.shape
    for thread in cutlass.range(128):
        places = copy.get_slice(thread).partition_D(out)
        for m in cutlass.range_constexpr(rows // 64):
            for n in cutlass.range_constexpr(columns // 16):
                values = cute.make_rmem_tensor(places[None, m, n].shape, Float32)
                for j in cutlass.range_constexpr(8):  # where WGMMA leaves what the epilogue takes as the j-th
                    row = 64 * m + thread // 32 * 16 + 8 * ((j // 2) % 2) + thread % 32 // 4
                    values[j] = Float32(row * columns + 16 * n + 8 * (j // 4) + 2 * (thread % 4) + j % 2)
                cute.copy(copy, values, places[None, m, n])


@cute.jit
def program(narrow: cute.Tensor, wide: cute.Tensor):
    """Both shapes that weight gradients have."""
    copy_all(narrow, 256)
    copy_all(wide, 128)


def main() -> None:
    tensors = [torch.full(shape, -1.0) for shape in ((64, 32), (128, 32))]
    arguments = [from_dlpack(tensor, assumed_align=16) for tensor in tensors]
    cute.compile(program, *arguments)(*arguments)
    for tensor in tensors:
        assert torch.equal(tensor.flatten(), torch.arange(tensor.numel()).float())


if __name__ == "__main__":
    main()
