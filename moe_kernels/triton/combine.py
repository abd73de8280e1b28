"""The gather-sum of expert rows per token: bound by memory, so plain Triton reaches the card's copy speed.

Rows of one token are added in the order of row_by_token_R, in fp32, without atomics. Row addresses are 64-bit. No size
but the row's width is an argument, so that nothing is compiled again for another number of tokens.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan

_ROWS_AT_A_TIME = 4  # this and the blocks: measured beside six others, docs/kernels.md
_BLOCKS = (256, 512)  # columns of one program, which is one warp


def combine_rows(rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
    """Return (T, D): each token's rows, weighted if scores are given, summed; zeros where a token has none."""
    T, D = plan.T, rows_RD.shape[1]
    out_TD = torch.empty(T, D, dtype=rows_RD.dtype, device=rows_RD.device)
    if T == 0:
        return out_TD
    block = block_width(D)
    _combine[(T, triton.cdiv(D, block))](
        rows_RD,
        rows_RD if score_R is None else score_R,
        plan.row_by_token_R,
        plan.token_offsets_T1,
        out_TD,
        D=D,
        BLOCK=block,
        ROWS=_ROWS_AT_A_TIME,
        weighted=score_R is not None,
        num_warps=1,
    )
    return out_TD


def block_width(D: int) -> int:
    """Return the columns of one program: the block that leaves the fewest lanes idle, then the larger."""
    return min(_BLOCKS, key=lambda width: (-(-D // width) * width, -width))


@triton.jit
def _combine(
    rows_RD,
    score_R,
    row_by_token_R,
    token_offsets_T1,
    out_TD,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    weighted: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < D
    first = tl.load(token_offsets_T1 + token)
    end = tl.load(token_offsets_T1 + token + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, end, ROWS):
        for i in tl.static_range(ROWS):
            is_row = start + i < end
            row = tl.load(row_by_token_R + start + i, mask=is_row, other=0).to(tl.int64)
            values = tl.load(rows_RD + row * D + column, mask=in_row & is_row, other=0.0).to(tl.float32)
            if weighted:
                values *= tl.load(score_R + row, mask=is_row, other=0.0)
            total += values
    tl.store(out_TD + token * D + column, total.to(out_TD.dtype.element_ty), mask=in_row)
