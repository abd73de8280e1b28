"""Scores of pairs to scores of rows in one launch, and in another the gradients of rows back to their pairs.

The twins in plain torch: moe_kernels/scores.py. No atomics; addresses are 64-bit. Nothing is compiled again for another
number of tokens.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan

_ROWS = 1024  # gathered by one program
_TOKENS = 16  # of one program: at 8 experts a token, one load for each of 128 threads
_ENTRIES = 128
_ZEROS = 1024  # written at a time


def gather_scores(score_TE: Tensor, plan: RoutingPlan) -> Tensor:
    """Return score_R, the score of each used row's pair; unused rows are not written."""
    score_R = torch.empty(plan.R, dtype=score_TE.dtype, device=score_TE.device)
    if plan.R > 0:
        _gather_scores[(triton.cdiv(plan.R, _ROWS),)](
            score_TE, plan.token_R, plan.expert_R, plan.expert_offsets_E1, score_R, plan.E, ROWS=_ROWS, num_warps=4
        )
    return score_R


def scatter_dscore(part_RX: Tensor, plan: RoutingPlan) -> Tensor:
    """Return (T, E): the sum of each used row's parts, left to right, in its pair's place, and zero everywhere else."""
    dscore_TE = torch.empty(plan.T, plan.E, dtype=part_RX.dtype, device=part_RX.device)
    if plan.T > 0:
        _scatter_dscore[(triton.cdiv(plan.T, _TOKENS),)](
            part_RX,
            plan.token_R,
            plan.expert_R,
            plan.token_offsets_T1,
            plan.row_by_token_R,
            dscore_TE,
            plan.T,
            plan.E,
            PARTS=part_RX.shape[1],
            TOKENS=_TOKENS,
            ENTRIES=_ENTRIES,
            ZEROS=_ZEROS,
            num_warps=4,
        )
    return dscore_TE


@triton.jit
def _gather_scores(score_TE, token_R, expert_R, expert_offsets_E1, score_R, E, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_used = row < tl.load(expert_offsets_E1 + E)
    token = tl.load(token_R + row, mask=is_used, other=0).to(tl.int64)
    expert = tl.load(expert_R + row, mask=is_used, other=0)
    tl.store(score_R + row, tl.load(score_TE + token * E + expert, mask=is_used), mask=is_used)


@triton.jit(do_not_specialize=["T"])
def _scatter_dscore(
    part_RX,
    token_R,
    expert_R,
    token_offsets_T1,
    row_by_token_R,
    dscore_TE,
    T,
    E,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ZEROS: tl.constexpr,
):
    first_token = tl.program_id(0) * TOKENS
    end_token = tl.minimum(first_token + TOKENS, T)
    mine = dscore_TE + first_token.to(tl.int64) * E
    size = (end_token - first_token) * E
    for start in range(0, size, ZEROS):
        at = start + tl.arange(0, ZEROS)
        tl.store(mine + at, 0.0, mask=at < size)
    # Other threads of this program wrote the zeros that it overwrites; no other program writes to its tokens.
    tl.debug_barrier()
    first, end = tl.load(token_offsets_T1 + first_token), tl.load(token_offsets_T1 + end_token)
    for start in range(first, end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        is_entry = entry < end
        row = tl.load(row_by_token_R + entry, mask=is_entry, other=0).to(tl.int64)
        token = tl.load(token_R + row, mask=is_entry, other=0).to(tl.int64)
        expert = tl.load(expert_R + row, mask=is_entry, other=0)
        total = tl.load(part_RX + row * PARTS, mask=is_entry, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(part_RX + row * PARTS + part, mask=is_entry, other=0.0)
        tl.store(dscore_TE + token * E + expert, total, mask=is_entry)
