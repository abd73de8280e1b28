"""From kept pairs to a RoutingPlan in two launches: count each tile of tokens, then write every row where it belongs.

The first launch counts the pairs of every (tile, expert). In the second every program adds the counts of all tiles
before its own, so that it knows each row's place without waiting for another program: no atomics, the same bits as
routing/build.py every time. A pair's place among its neighbours is a running count, which is a product with a triangle
of ones: exact, and the tensor cores do it without a barrier for every step. The keep mask of token rounding comes from
rounding.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.operators import operator
from moe_kernels.routing.plan import RoutingPlan

_COUNT_CHUNK = 128  # tokens counted together
_CHUNK = 64  # tokens whose rows are written together: the rows of one tensor-core product
_MAX_WIDTH = 128  # experts looked at together; more take several programs
_MAX_TILES = 132  # one for each multiprocessor of an H200; every program reads the counts of all
_COUNTS_AT_A_TIME = 8192
_FILL = 1024

PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Tiling(NamedTuple):
    """How (T, E) pairs are dealt to programs: ``num_tiles`` times ``groups``."""

    width: int  # experts of one group: E rounded up to a power of two, at most 128; lanes past E idle
    groups: int
    tokens: int  # of one tile, a multiple of both chunks
    num_tiles: int
    num_warps: int


class PairCounts(NamedTuple):
    """What the first launch leaves for the second."""

    of_expert_PE: Tensor  # int16, pairs of each tile and expert
    of_token_GT: Tensor  # int16, pairs of each token in each group of experts
    of_tile_PG: Tensor  # int32, pairs of each tile in each group of experts


def tiling(T: int, E: int) -> Tiling:
    """Return the tiling of T tokens and E experts."""
    width = min(_MAX_WIDTH, max(16, triton.next_power_of_2(E)))
    tokens = _COUNT_CHUNK * triton.cdiv(max(T, 1), _COUNT_CHUNK * _MAX_TILES)
    tokens = min(tokens, 2**15 - _COUNT_CHUNK)  # a count must fit in 16 bits
    return Tiling(width, triton.cdiv(E, width), tokens, triton.cdiv(T, tokens), num_warps=16 if width > 64 else 8)


def plan_from_mask(keep_TE: Tensor, *, R: int) -> RoutingPlan:
    """Return the plan of the boolean ``keep_TE`` in ``R`` allocated rows: routing/build.py's, bit for bit."""
    T, E = keep_TE.shape
    return as_plan(torch.ops.gristmill.plan_from_mask(keep_TE, R), T, E, R)


def plan_from_experts(expert_TK: Tensor, E: int, *, R: int) -> RoutingPlan:
    """Return the plan of the pairs named by integer expert ids; ids outside 0..E-1, and repeated ids, add no pair."""
    return as_plan(torch.ops.gristmill.plan_from_experts(expert_TK, E, R), expert_TK.shape[0], E, R)


def as_plan(tensors: PlanTensors, T: int, E: int, R: int) -> RoutingPlan:
    """Return the plan of an operator's five tensors, which come in the order of RoutingPlan's fields."""
    token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R = tensors
    return RoutingPlan(token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R, T, E, R)


@operator("plan_from_mask")
def _plan_from_mask(keep_TE: Tensor, R: int) -> PlanTensors:
    T, E = keep_TE.shape
    return write_plan(keep_TE.contiguous().view(torch.int8), T, E, R=R)


@operator("plan_from_experts")
def _plan_from_experts(expert_TK: Tensor, E: int, R: int) -> PlanTensors:
    return write_plan(expert_TK.contiguous(), expert_TK.shape[0], E, R=R, K=expert_TK.shape[1])


@_plan_from_mask.register_fake
def _(keep_TE: Tensor, R: int) -> PlanTensors:
    T, E = keep_TE.shape
    return empty_plan(keep_TE, T, E, R)


@_plan_from_experts.register_fake
def _(expert_TK: Tensor, E: int, R: int) -> PlanTensors:
    return empty_plan(expert_TK, expert_TK.shape[0], E, R)


def empty_plan(like: Tensor, T: int, E: int, R: int) -> PlanTensors:
    """Return the five tensors of a plan, uninitialised, on the device of ``like``."""
    token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R = (
        torch.empty(length, dtype=torch.int32, device=like.device) for length in (R, R, E + 1, T + 1, R)
    )
    return token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R


def write_plan(
    source: Tensor, T: int, E: int, *, R: int, K: int | None = None, keep_TE: Tensor | None = None
) -> PlanTensors:
    """Return the plan's tensors from contiguous int8 keep_TE or, where K is given, from integer expert ids (T, K).

    Where ``keep_TE`` is given, ``source`` is keep_ET, and its transpose is written there. Nothing is written past R
    rows, whatever the pairs are.
    """
    plan = empty_plan(source, T, E, R)
    if T == 0:
        for tensor in plan:
            tensor.zero_()
        return plan
    tiles = tiling(T, E)
    grid = (tiles.num_tiles, tiles.groups)
    counts = PairCounts(
        torch.empty(tiles.num_tiles, E, dtype=torch.int16, device=source.device),
        torch.empty(tiles.groups, T, dtype=torch.int16, device=source.device),
        torch.empty(grid, dtype=torch.int32, device=source.device),
    )
    sizes = (T, E, 0 if K is None else K, tiles.tokens)
    block = {"WIDTH": tiles.width, "num_warps": tiles.num_warps}
    _count_pairs[grid](
        source,
        source if keep_TE is None else keep_TE,
        *counts,
        *sizes,
        from_ids=K is not None,
        transposed=keep_TE is not None,
        CHUNK=_COUNT_CHUNK if keep_TE is None else _CHUNK,  # of both forms at once a thread holds fewer
        **block,
    )
    _write_plan[grid](
        source if keep_TE is None else keep_TE,
        *counts,
        *plan,
        R,
        *sizes,
        from_ids=K is not None,
        COUNTS=_COUNTS_AT_A_TIME // tiles.width,
        GROUPS=triton.next_power_of_2(tiles.groups),
        FILL=_FILL,
        CHUNK=_CHUNK,
        **block,
    )
    return plan


@triton.jit
def _keep(source, token_C, expert_W, T, E, K, from_ids: tl.constexpr, transposed: tl.constexpr):
    """Return the (CHUNK, WIDTH) mask of kept pairs, false outside (T, E)."""
    exists = (token_C < T)[:, None] & (expert_W < E)[None, :]
    if from_ids:
        keep = (token_C[:, None] < 0) & (expert_W[None, :] < 0)
        for k in range(K):
            chosen_C = tl.load(source + token_C.to(tl.int64) * K + k, mask=token_C < T, other=-1)
            keep = keep | (chosen_C[:, None] == expert_W[None, :])
    elif transposed:
        keep = tl.load(source + expert_W.to(tl.int64)[None, :] * T + token_C[:, None], mask=exists, other=0) != 0
    else:
        keep = tl.load(source + token_C.to(tl.int64)[:, None] * E + expert_W[None, :], mask=exists, other=0) != 0
    return keep & exists


@triton.jit(do_not_specialize=["K", "tokens"])
def _count_pairs(
    source,
    keep_TE,
    of_expert_PE,
    of_token_GT,
    of_tile_PG,
    T,
    E,
    K,
    tokens,
    from_ids: tl.constexpr,
    transposed: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tile, group = tl.program_id(0), tl.program_id(1)
    expert_W = group * WIDTH + tl.arange(0, WIDTH)
    count_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.int32)
    for first in range(tile * tokens, tl.minimum((tile + 1) * tokens, T), CHUNK):
        token_C = first + tl.arange(0, CHUNK)
        keep_CW = _keep(source, token_C, expert_W, T, E, K, from_ids, transposed)
        count_CW += keep_CW.to(tl.int32)
        num_C = tl.sum(keep_CW.to(tl.int32), axis=1)
        tl.store(of_token_GT + group * T + token_C, num_C.to(tl.int16), mask=token_C < T)
        if transposed:
            exists = (token_C < T)[:, None] & (expert_W < E)[None, :]
            place_CW = token_C.to(tl.int64)[:, None] * E + expert_W[None, :]
            tl.store(keep_TE + place_CW, keep_CW.to(tl.int8), mask=exists)
    count_W = tl.sum(count_CW, axis=0)
    tl.store(of_expert_PE + tile * E + expert_W, count_W.to(tl.int16), mask=expert_W < E)
    tl.store(of_tile_PG + tile * tl.num_programs(1) + group, tl.sum(count_W, axis=0))


@triton.jit
def _sum_of_expert(of_expert_PE, tile, num_tiles, expert_W, E, WIDTH: tl.constexpr, COUNTS: tl.constexpr):
    """Return each expert's pairs in all tiles and in those before ``tile``."""
    total_QW = tl.zeros((COUNTS, WIDTH), dtype=tl.int32)
    before_QW = tl.zeros((COUNTS, WIDTH), dtype=tl.int32)
    for first in range(0, num_tiles, COUNTS):
        tile_Q = first + tl.arange(0, COUNTS)
        exists = (tile_Q < num_tiles)[:, None] & (expert_W < E)[None, :]
        count_QW = tl.load(of_expert_PE + tile_Q[:, None] * E + expert_W[None, :], mask=exists, other=0).to(tl.int32)
        total_QW += count_QW
        before_QW += tl.where((tile_Q < tile)[:, None], count_QW, 0)
    return tl.sum(total_QW, axis=0), tl.sum(before_QW, axis=0)


@triton.jit
def _sum_of_tile(of_tile_PG, tile, group, num_tiles, groups, COUNTS: tl.constexpr, GROUPS: tl.constexpr):
    """Return all pairs, those of the groups of experts before ``group``, and those of the tiles before ``tile``."""
    total_QG = tl.zeros((COUNTS, GROUPS), dtype=tl.int32)
    before_QG = tl.zeros((COUNTS, GROUPS), dtype=tl.int32)
    group_G = tl.arange(0, GROUPS)
    for first in range(0, num_tiles, COUNTS):
        tile_Q = first + tl.arange(0, COUNTS)
        exists = (tile_Q < num_tiles)[:, None] & (group_G < groups)[None, :]
        count_QG = tl.load(of_tile_PG + tile_Q[:, None] * groups + group_G[None, :], mask=exists, other=0)
        total_QG += count_QG
        before_QG += tl.where((tile_Q < tile)[:, None], count_QG, 0)
    total_G = tl.sum(total_QG, axis=0)
    in_groups_before = tl.sum(tl.where(group_G < group, total_G, 0), axis=0)
    return tl.sum(total_G, axis=0), in_groups_before, tl.sum(tl.sum(before_QG, axis=0), axis=0)


@triton.jit(do_not_specialize=["R", "K", "tokens"])
def _write_plan(
    source,
    of_expert_PE,
    of_token_GT,
    of_tile_PG,
    token_R,
    expert_R,
    expert_offsets_E1,
    token_offsets_T1,
    row_by_token_R,
    R,
    T,
    E,
    K,
    tokens,
    from_ids: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    GROUPS: tl.constexpr,
    FILL: tl.constexpr,
):
    tile, group = tl.program_id(0), tl.program_id(1)
    num_tiles, groups = tl.num_programs(0), tl.num_programs(1)
    expert_W = group * WIDTH + tl.arange(0, WIDTH)
    total_W, before_W = _sum_of_expert(of_expert_PE, tile, num_tiles, expert_W, E, WIDTH, COUNTS)
    used, first_row, entry = _sum_of_tile(of_tile_PG, tile, group, num_tiles, groups, COUNTS, GROUPS)
    end_W = first_row + tl.cumsum(total_W, axis=0)
    if tile == 0:
        tl.store(expert_offsets_E1 + 1 + expert_W, end_W, mask=expert_W < E)
        if group == 0:
            tl.store(expert_offsets_E1, 0)
            tl.store(token_offsets_T1, 0)
    row_W = end_W - total_W + before_W  # the next row of each expert; entry: the next one of row_by_token_R
    in_chunk_C, in_group_W, group_G = tl.arange(0, CHUNK), tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    not_after_CC = (in_chunk_C[:, None] >= in_chunk_C[None, :]).to(tl.float16)
    not_before_WW = (in_group_W[:, None] <= in_group_W[None, :]).to(tl.float16)
    for first in range(tile * tokens, tl.minimum((tile + 1) * tokens, T), CHUNK):
        token_C = first + in_chunk_C
        keep_CW = _keep(source, token_C, expert_W, T, E, K, from_ids, False)
        exists = (group_G < groups)[:, None] & (token_C < T)[None, :]
        num_GC = tl.load(of_token_GT + group_G[:, None] * T + token_C[None, :], mask=exists, other=0).to(tl.int32)
        num_C = tl.sum(num_GC, axis=0)
        end_C = entry + tl.cumsum(num_C, axis=0)
        entry += tl.sum(num_C, axis=0)
        if group == 0:
            tl.store(token_offsets_T1 + 1 + token_C, end_C, mask=token_C < T)
        first_entry_C = end_C - tl.sum(tl.where((group_G >= group)[:, None], num_GC, 0), axis=0)
        one_CW = keep_CW.to(tl.float16)
        # Counts up to 128, from and to fp32: exact.
        row_CW = row_W[None, :] + tl.dot(not_after_CC, one_CW).to(tl.int32) - 1
        entry_CW = first_entry_C[:, None] + tl.dot(one_CW, not_before_WW).to(tl.int32) - 1
        row_W += tl.sum(keep_CW.to(tl.int32), axis=0)
        zero_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.int32)
        # Widened here, so that 32-bit numbers and not 64-bit addresses move to the threads that store.
        tl.store(token_R + row_CW.to(tl.int64), zero_CW + token_C[:, None], mask=keep_CW & (row_CW < R))
        tl.store(expert_R + row_CW.to(tl.int64), zero_CW + expert_W[None, :], mask=keep_CW & (row_CW < R))
        tl.store(row_by_token_R + entry_CW.to(tl.int64), row_CW, mask=keep_CW & (entry_CW < R))
    program, num_programs = tile * groups + group, num_tiles * groups
    for first in range(used + program * FILL, R, num_programs * FILL):
        unused_F = first + tl.arange(0, FILL)
        zero_F = tl.zeros((FILL,), dtype=tl.int32)
        tl.store(token_R + unused_F, zero_F, mask=unused_F < R)
        tl.store(expert_R + unused_F, zero_F, mask=unused_F < R)
        tl.store(row_by_token_R + unused_F, zero_F, mask=unused_F < R)
