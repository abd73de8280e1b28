"""Matrix products of 16-bit numbers whose results are not rounded to 16 bits."""

import torch
from torch import Tensor


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` added up and kept in fp32 (fp64 if the inputs are), whatever the inputs' dtype."""
    if multiplies_as_is(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    wide = torch.promote_types(left.dtype, torch.float32)
    return left.to(wide) @ right.to(wide)


def multiplies_as_is(left: Tensor, right: Tensor) -> bool:
    """Return whether CUDA multiplies the bf16 numbers as they are, adding and answering in fp32: the same product."""
    return left.is_cuda and left.dtype is torch.bfloat16 and right.dtype is torch.bfloat16
