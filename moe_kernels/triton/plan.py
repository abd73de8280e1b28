"""From kept pairs to a RoutingPlan in two launches: count each tile of tokens, then write every row where it belongs.

The first launch counts the pairs of every (tile, expert). In the second every program adds the counts of all tiles
before its own, so that it knows each row's place without waiting for another program: no atomics, the same bits as
routing/build.py every time. The keep mask of token rounding, with its counts, comes from rounding.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan

_ELEMENTS = 4096  # (token, expert) pairs that a program looks at together
_PER_THREAD = 8  # of them; with 32 the write spills registers, with 16 one program fills a multiprocessor
_MAX_TILES = 256  # about two for each multiprocessor; every program reads the counts of all
_COUNTS_AT_A_TIME = 4096
_FILL = 1024

PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Tiling(NamedTuple):
    """How T tokens are dealt to programs."""

    width: int  # E rounded up to a power of two: lanes past E idle
    chunk: int  # tokens looked at together
    tokens: int  # tokens of one program, a multiple of the chunk
    num_tiles: int
    num_warps: int


def tiling(T: int, E: int) -> Tiling:
    """Return the tiling of a (T, E) mask; every kernel that counts tiles for ``write_plan`` uses this one."""
    width = max(16, triton.next_power_of_2(E))
    chunk = max(4, _ELEMENTS // width)
    tokens = chunk * triton.cdiv(T, chunk * _MAX_TILES)
    num_tiles = triton.cdiv(T, tokens) if T else 0
    return Tiling(width, chunk, tokens, num_tiles, num_warps=width * chunk // (32 * _PER_THREAD))


def plan_from_mask(keep_TE: Tensor, *, R: int) -> RoutingPlan:
    """Return the plan of the boolean ``keep_TE`` in ``R`` allocated rows: routing/build.py's, bit for bit."""
    T, E = keep_TE.shape
    return as_plan(torch.ops.gristmill.plan_from_mask(keep_TE, R), T=T, E=E, R=R)


def plan_from_experts(expert_TK: Tensor, E: int, *, R: int) -> RoutingPlan:
    """Return the plan of the pairs named by integer expert ids; ids outside 0..E-1, and repeated ids, add no pair."""
    T = expert_TK.shape[0]
    return as_plan(torch.ops.gristmill.plan_from_experts(expert_TK, E, R), T=T, E=E, R=R)


def as_plan(tensors: PlanTensors, *, T: int, E: int, R: int) -> RoutingPlan:
    """Return the plan of an operator's five tensors, which come in the order of RoutingPlan's fields."""
    token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R = tensors
    return RoutingPlan(
        token_R=token_R,
        expert_R=expert_R,
        expert_offsets_E1=expert_offsets_E1,
        token_offsets_T1=token_offsets_T1,
        row_by_token_R=row_by_token_R,
        T=T,
        E=E,
        R=R,
    )


@torch.library.custom_op("gristmill::plan_from_mask", mutates_args=())
def _plan_from_mask(keep_TE: Tensor, R: int) -> PlanTensors:
    T, E = keep_TE.shape
    keep_TE = keep_TE.contiguous().view(torch.int8)
    return write_plan(keep_TE, _counted(keep_TE, T, E), T=T, E=E, R=R)


@_plan_from_mask.register_fake
def _(keep_TE: Tensor, R: int) -> PlanTensors:
    T, E = keep_TE.shape
    return empty_plan(keep_TE, T, E, R)


@torch.library.custom_op("gristmill::plan_from_experts", mutates_args=())
def _plan_from_experts(expert_TK: Tensor, E: int, R: int) -> PlanTensors:
    T, K = expert_TK.shape
    expert_TK = expert_TK.contiguous()
    return write_plan(expert_TK, _counted(expert_TK, T, E, K=K), T=T, E=E, R=R, K=K)


@_plan_from_experts.register_fake
def _(expert_TK: Tensor, E: int, R: int) -> PlanTensors:
    return empty_plan(expert_TK, expert_TK.shape[0], E, R)


def empty_plan(like: Tensor, T: int, E: int, R: int) -> PlanTensors:
    """Return the five tensors of a plan, uninitialised, on the device of ``like``."""
    token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R = (
        torch.empty(length, dtype=torch.int32, device=like.device) for length in (R, R, E + 1, T + 1, R)
    )
    return token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R


def _counted(source: Tensor, T: int, E: int, *, K: int | None = None) -> Tensor:
    """Return the (tiles, E) counts of a keep mask or, where K is given, of (T, K) expert ids."""
    tiles = tiling(T, E)
    count_PE = torch.empty(tiles.num_tiles, E, dtype=torch.int32, device=source.device)
    if T > 0:
        _count_pairs[(tiles.num_tiles,)](
            source,
            count_PE,
            T,
            E,
            0 if K is None else K,
            tiles.tokens,
            from_ids=K is not None,
            WIDTH=tiles.width,
            CHUNK=tiles.chunk,
            num_warps=tiles.num_warps,
        )
    return count_PE


def write_plan(source: Tensor, count_PE: Tensor, *, T: int, E: int, R: int, K: int | None = None) -> PlanTensors:
    """Return the plan's tensors from a contiguous keep mask or, where K is given, expert ids; and its tiles' counts.

    Nothing is written past R rows, whatever the counts say.
    """
    plan = empty_plan(source, T, E, R)
    if T == 0:
        for tensor in plan:
            tensor.zero_()
        return plan
    tiles = tiling(T, E)
    _write_plan[(tiles.num_tiles,)](
        source,
        count_PE,
        *plan,
        T,
        E,
        R,
        0 if K is None else K,
        tiles.tokens,
        from_ids=K is not None,
        WIDTH=tiles.width,
        CHUNK=tiles.chunk,
        COUNTS=max(1, _COUNTS_AT_A_TIME // tiles.width),
        FILL=_FILL,
        num_warps=tiles.num_warps,
    )
    return plan


@triton.jit
def _keep(source, token_C, expert_W, T, E, K, from_ids: tl.constexpr):
    """Return the int32 (CHUNK, WIDTH) mask of kept pairs, zero outside (T, E)."""
    exists = (token_C < T)[:, None] & (expert_W < E)[None, :]
    if from_ids:
        keep = (token_C[:, None] < 0) & (expert_W[None, :] < 0)
        for k in range(K):
            chosen_C = tl.load(source + token_C.to(tl.int64) * K + k, mask=token_C < T, other=-1)
            keep = keep | (chosen_C[:, None] == expert_W[None, :])
    else:
        keep = tl.load(source + token_C.to(tl.int64)[:, None] * E + expert_W[None, :], mask=exists, other=0) != 0
    return (keep & exists).to(tl.int32)


@triton.jit(do_not_specialize=["K", "tokens"])
def _count_pairs(source, count_PE, T, E, K, tokens, from_ids: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    tile = tl.program_id(0)
    expert_W = tl.arange(0, WIDTH)
    count_W = tl.zeros((WIDTH,), dtype=tl.int32)
    for first in range(tile * tokens, (tile + 1) * tokens, CHUNK):
        count_W += tl.sum(_keep(source, first + tl.arange(0, CHUNK), expert_W, T, E, K, from_ids), axis=0)
    tl.store(count_PE + tile * E + expert_W, count_W, mask=expert_W < E)


@triton.jit(do_not_specialize=["R", "K", "tokens"])
def _write_plan(
    source,
    count_PE,
    token_R,
    expert_R,
    expert_offsets_E1,
    token_offsets_T1,
    row_by_token_R,
    T,
    E,
    R,
    K,
    tokens,
    from_ids: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    FILL: tl.constexpr,
):
    tile = tl.program_id(0)
    num_tiles = tl.num_programs(0)
    expert_W = tl.arange(0, WIDTH)
    total_W = tl.zeros((WIDTH,), dtype=tl.int32)
    before_W = tl.zeros((WIDTH,), dtype=tl.int32)
    for first in range(0, num_tiles, COUNTS):
        tile_C = first + tl.arange(0, COUNTS)
        exists = (tile_C < num_tiles)[:, None] & (expert_W < E)[None, :]
        count_CW = tl.load(count_PE + tile_C[:, None] * E + expert_W[None, :], mask=exists, other=0)
        total_W += tl.sum(count_CW, axis=0)
        before_W += tl.sum(tl.where((tile_C < tile)[:, None], count_CW, 0), axis=0)
    end_W = tl.cumsum(total_W, axis=0)
    if tile == 0:
        tl.store(expert_offsets_E1, 0)
        tl.store(token_offsets_T1, 0)
        tl.store(expert_offsets_E1 + 1 + expert_W, end_W, mask=expert_W < E)
    row_W = end_W - total_W + before_W  # the next row of each expert
    entry = tl.sum(before_W, axis=0)  # the next entry of row_by_token_R
    for first in range(tile * tokens, (tile + 1) * tokens, CHUNK):
        token_C = first + tl.arange(0, CHUNK)
        keep_CW = _keep(source, token_C, expert_W, T, E, K, from_ids)
        row_CW = row_W[None, :] + tl.cumsum(keep_CW, axis=0) - keep_CW
        row_W += tl.sum(keep_CW, axis=0)
        num_C = tl.sum(keep_CW, axis=1)
        end_C = entry + tl.cumsum(num_C, axis=0)
        entry += tl.sum(num_C, axis=0)
        entry_CW = (end_C - num_C)[:, None] + tl.cumsum(keep_CW, axis=1) - keep_CW
        is_row = (keep_CW != 0) & (row_CW < R)
        zero_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.int32)
        tl.store(token_R + row_CW, zero_CW + token_C[:, None], mask=is_row)
        tl.store(expert_R + row_CW, zero_CW + expert_W[None, :], mask=is_row)
        tl.store(row_by_token_R + entry_CW, row_CW, mask=(keep_CW != 0) & (entry_CW < R))
        tl.store(token_offsets_T1 + 1 + token_C, end_C, mask=token_C < T)
    for first in range(tl.sum(total_W, axis=0) + tile * FILL, R, num_tiles * FILL):
        unused_F = first + tl.arange(0, FILL)
        zero_F = tl.zeros((FILL,), dtype=tl.int32)
        tl.store(token_R + unused_F, zero_F, mask=unused_F < R)
        tl.store(expert_R + unused_F, zero_F, mask=unused_F < R)
        tl.store(row_by_token_R + unused_F, zero_F, mask=unused_F < R)
