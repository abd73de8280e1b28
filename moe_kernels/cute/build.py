"""From a KernelKey to a compiled kernel, on any machine with nvidia-cutlass-dsl: no GPU is needed, nothing is run."""
# mypy: disable-error-code="import-not-found"

from typing import Any

import cutlass
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from moe_kernels.cute.compile import KernelKey
from moe_kernels.cute.sm90.grouped_gemm import GroupedGemm
from moe_kernels.cute.sm90.weight_grad import WeightGrad
from moe_kernels.cute.tiles import KernelForm

_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


def build_kernel(key: KernelKey) -> Any:
    """Return the compiled kernel; it takes torch tensors in the order of ``kernel_arguments``."""
    dtype = _DTYPES[key.dtype]
    shape = {"contraction": key.contraction, "columns": key.columns, "dtype": dtype, "tile": key.tile}
    kernel: Any
    if key.form.is_weight_grad:
        kernel = WeightGrad(key.form, rows=key.contraction, columns=key.columns, dtype=dtype, tile=key.tile)
    else:
        kernel = GroupedGemm(key.form, **shape)
    return cute.compile(kernel, *kernel_arguments(key), options="--enable-tvm-ffi")


def kernel_arguments(key: KernelKey) -> tuple:
    """Return stand-ins for the arguments: widths as numbers, everything else to be known at the call."""
    dtype = _DTYPES[key.dtype]
    T, R, E, E1 = (cute.sym_int32() for _ in range(4))
    X, Y = key.contraction, key.columns
    token_R, offsets_E1 = _tensor(Int32, R), _tensor(Int32, E1)
    launch = (_tensor(Int32, 1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))  # counter, clusters, stream
    rows = _tensor(dtype, T if key.form.gathers else R, X)
    weights: Any
    tensors: tuple
    match key.form:
        case KernelForm.up:
            weights, tensors = _tensor(dtype, E, 2 * Y, X), (_tensor(dtype, R, 2 * Y), _tensor(dtype, R, Y))
        case KernelForm.up_inference:
            weights, tensors = _tensor(dtype, E, 2 * Y, X), (_tensor(dtype, R, Y),)
        case KernelForm.rows_matmul_k_major:
            weights, tensors = _tensor(dtype, E, Y, X), (_tensor(dtype, R, Y),)
        case KernelForm.rows_matmul_n_major:
            weights, tensors = _tensor(dtype, E, X, Y), (_tensor(dtype, R, Y),)
        case KernelForm.down_backward:
            weights = _tensor(dtype, E, X, Y)
            parts = _tensor(cutlass.Float32, R, cute.sym_int32())
            dh, scaled_a, h = _tensor(dtype, R, 2 * Y), _tensor(dtype, R, Y), _tensor(dtype, R, 2 * Y)
            tensors = (dh, scaled_a, parts, h, _tensor(cutlass.Float32, R))
        case _ if key.form.is_weight_grad:
            left_rows, right_rows = (T, R) if key.form.gathers_left else (R, T)
            grad = _tensor(cutlass.Float32 if key.form.accumulates else dtype, E, X, Y)
            left, right = _tensor(dtype, left_rows, X), _tensor(dtype, right_rows, Y)
            return (left, right, token_R, offsets_E1, grad, *launch)
    return (rows, weights, token_R, offsets_E1, tensors, *launch)


def _tensor(dtype: type[cutlass.Numeric], *shape: Any) -> Any:
    """Return a stand-in for a contiguous tensor. TMA and 16-byte copies need 16-byte bases; torch's are."""
    order = tuple(reversed(range(len(shape))))
    align = 16 if (len(shape) == 2 and dtype.width == 16) or len(shape) == 3 else 4
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)
