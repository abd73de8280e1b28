"""Token rounding on the GPU: which tokens each expert adds or drops, found without a sort and without the host.

One program per expert counts its own column. The pair at the margin is the n-th in the order in which pairs move; its
value is found by bisection over the 32 bits of the key, its token, where equal values meet, over the bits of the token.
Two numbers per expert then say of every pair whether it moves. The rules are those of routing/token_rounding.py, in
integers, so the plan is the same bits. docs/token_rounding.md states them.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.routing.counter_hash import checked_seed
from moe_kernels.routing.kinds import Rounding, RoutingKind
from moe_kernels.routing.plan import Routing, row_capacity
from moe_kernels.triton.choice import ordered_bits
from moe_kernels.triton.plan import PlanTensors, as_plan, empty_plan, tiling, write_plan

_HELD_TOKENS = 32768  # a longer column is read anew for every count instead of being held in registers
_BLOCK = 8192

_RULES = list(Rounding)
_NEAREST = tl.constexpr(_RULES.index(Rounding.nearest))
_STOCHASTIC = tl.constexpr(_RULES.index(Rounding.stochastic))
_NEAREST_SCORE = tl.constexpr(_RULES.index(Rounding.nearest_score))
_BALANCED = tl.constexpr(_RULES.index(Rounding.balanced))
_UP = tl.constexpr(_RULES.index(Rounding.up))
_INT32_MIN = tl.constexpr(-(2**31))

_KEYS_PER_THREAD = 64  # half of a thread's registers where 16 warps share a multiprocessor

RoundedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def round_choice(
    prob_ET: Tensor,
    top_k_mask_TE: Tensor,
    top_k_mask_ET: Tensor,
    count_E: Tensor,
    *,
    K: int,
    tile_m: int,
    rounding: Rounding,
    seed: int | Tensor | None,
) -> Routing:
    """Return the routing of a top-K choice, given both ways round, with every expert's count moved to the tile.

    Raises: ValueError if ``stochastic`` gets no seed.
    """
    E, T = prob_ET.shape
    if rounding is not Rounding.stochastic:
        seed = None
    elif not isinstance(seed, Tensor):
        seed = torch.full((), checked_seed(seed), dtype=torch.int64, device=prob_ET.device)
    else:
        seed = seed.to(device=prob_ET.device, dtype=torch.int64)
    R = row_capacity(RoutingKind.token_rounding, T=T, E=E, K=K, tile_m=tile_m, rounding=rounding)
    keep_TE, *plan = torch.ops.gristmill.round_to_tiles(
        prob_ET, top_k_mask_ET, count_E, seed, tile_m, rounding.value, R
    )
    return Routing(plan=as_plan(plan, T=T, E=E, R=R), top_k_mask_TE=top_k_mask_TE, keep_TE=keep_TE)


@torch.library.custom_op("gristmill::round_to_tiles", mutates_args=())
def _round_to_tiles(
    prob_ET: Tensor, top_k_mask_ET: Tensor, count_E: Tensor, seed: Tensor | None, tile_m: int, rounding: str, R: int
) -> RoundedTensors:
    """Return keep_TE and the five tensors of its plan after moving every expert's count to a multiple of the tile.

    ``prob_ET`` is fp32 and contiguous, ``count_E`` holds the experts' top-K pairs, ``seed`` is a zero-dimensional
    integer tensor that only ``stochastic`` reads, ``rounding`` a value of ``Rounding``.
    """
    E, T = prob_ET.shape
    keep_TE = torch.empty(T, E, dtype=torch.bool, device=prob_ET.device)
    keep_int8 = keep_TE.view(torch.int8)
    tiles = tiling(T, E)
    count_PE = torch.empty(tiles.num_tiles, E, dtype=torch.int32, device=prob_ET.device)
    if T > 0:
        margin_E3 = torch.empty(E, 3, dtype=torch.int32, device=prob_ET.device)
        held = T <= _HELD_TOKENS
        block = max(16, triton.next_power_of_2(T)) if held else _BLOCK
        _find_margins[(E,)](
            prob_ET,
            top_k_mask_ET.view(torch.int8),
            count_E,
            count_E if seed is None else seed,
            margin_E3,
            T,
            E,
            tile_m,
            T.bit_length(),
            RULE=_RULES.index(Rounding(rounding)),
            WIDTH=tiles.width,
            BLOCK=block,
            held=held,
            num_warps=column_warps(block),
        )
        _apply_margins[(tiles.num_tiles,)](
            prob_ET,
            top_k_mask_ET.view(torch.int8),
            margin_E3,
            keep_int8,
            count_PE,
            T,
            E,
            tiles.tokens,
            WIDTH=tiles.width,
            CHUNK=tiles.chunk,
            num_warps=tiles.num_warps,
        )
    return keep_TE, *write_plan(keep_int8, count_PE, T=T, E=E, R=R)


@_round_to_tiles.register_fake
def _(
    prob_ET: Tensor, top_k_mask_ET: Tensor, count_E: Tensor, seed: Tensor | None, tile_m: int, rounding: str, R: int
) -> RoundedTensors:
    E, T = prob_ET.shape
    plan: PlanTensors = empty_plan(prob_ET, T, E, R)
    return prob_ET.new_empty((T, E), dtype=torch.bool), *plan


def column_warps(block: int) -> int:
    """Return the warps of the program that looks at ``block`` tokens together."""
    return min(16, max(4, block // (32 * _KEYS_PER_THREAD)))


@triton.jit
def _move_keys(prob, is_top_k, adds):
    """Return int32 keys that fall in the order in which pairs move; the lowest int32 for pairs that cannot move."""
    ordered = ordered_bits(prob)
    key = tl.maximum(tl.where(adds, ordered, ordered ^ -1), _INT32_MIN + 1)
    return tl.where(is_top_k == adds, _INT32_MIN, key)


@triton.jit
def _load_keys(prob_T, top_k_mask_T, first, T, adds, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    prob = tl.load(prob_T + token, mask=token < T, other=0.0)
    is_top_k = tl.load(top_k_mask_T + token, mask=token < T, other=0) != 0
    return tl.where(token < T, _move_keys(prob, is_top_k, adds), _INT32_MIN)


@triton.jit
def _count(keys, prob_T, top_k_mask_T, T, adds, least, BLOCK: tl.constexpr, held: tl.constexpr):
    """Return how many keys are ``least`` or above."""
    count = tl.zeros((), dtype=tl.int32)
    if held:
        count += tl.sum((keys >= least).to(tl.int32), axis=0)
    else:
        for first in range(0, T, BLOCK):
            some = _load_keys(prob_T, top_k_mask_T, first, T, adds, BLOCK)
            count += tl.sum((some >= least).to(tl.int32), axis=0)
    return count


@triton.jit
def _count_equal(keys, prob_T, top_k_mask_T, T, adds, key, turns, BLOCK: tl.constexpr, held: tl.constexpr):
    """Return how many keys equal ``key`` at fewer than ``turns`` tokens from the end where moving starts."""
    count = tl.zeros((), dtype=tl.int32)
    if held:
        count += tl.sum(((keys == key) & (_turn(0, T, adds, BLOCK) < turns)).to(tl.int32), axis=0)
    else:
        for first in range(0, T, BLOCK):
            some = _load_keys(prob_T, top_k_mask_T, first, T, adds, BLOCK)
            count += tl.sum(((some == key) & (_turn(first, T, adds, BLOCK) < turns)).to(tl.int32), axis=0)
    return count


@triton.jit
def _turn(first, T, adds, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    return tl.where(adds, token, T - 1 - token)


@triton.jit
def _margin(keys, prob_T, top_k_mask_T, T, adds, num, token_bits, BLOCK: tl.constexpr, held: tl.constexpr):
    """Return (key, turns): the first ``num`` pairs to move are those above the key, and those at it before the turn.

    Where pairs with equal keys stand for one place, the lower token moves in first and the higher moves out first.
    """
    key = tl.full((), _INT32_MIN, tl.int32)
    for i in range(32):
        # In two's complement the first step clears the sign and the others set a bit: the value only rises.
        higher = key ^ (tl.full((), 1, tl.int32) << (31 - i))
        enough = _count(keys, prob_T, top_k_mask_T, T, adds, higher, BLOCK, held) >= num
        key = tl.where(enough, higher, key)
    at_least = _count(keys, prob_T, top_k_mask_T, T, adds, key, BLOCK, held)
    equal = _count_equal(keys, prob_T, top_k_mask_T, T, adds, key, T, BLOCK, held)
    wanted = num - (at_least - equal)
    turns = tl.full((), 0, tl.int32) + T
    if wanted < equal:
        turns = tl.full((), 0, tl.int32)
        for i in range(token_bits):
            more = turns + (tl.full((), 1, tl.int32) << (token_bits - 1 - i))
            enough = _count_equal(keys, prob_T, top_k_mask_T, T, adds, key, more, BLOCK, held) <= wanted
            turns = tl.where(enough, more, turns)
    return key, turns


@triton.jit
def _moved(keys, token, T, adds, key, turns):
    turn = tl.where(adds, token, T - 1 - token)
    return (keys > key) | ((keys == key) & (turn < turns))


@triton.jit
def _moved_units(prob_T, top_k_mask_T, T, adds, key, turns, BLOCK: tl.constexpr = 4096):
    """Return the summed probability of the pairs that move, each truncated to units of 2⁻⁴⁰."""
    units = tl.zeros((), dtype=tl.int64)
    for first in range(0, T, BLOCK):
        token = first + tl.arange(0, BLOCK)
        some = _load_keys(prob_T, top_k_mask_T, first, T, adds, BLOCK)
        prob = tl.load(prob_T + token, mask=token < T, other=0.0)
        moved = _moved(some, token, T, adds, key, turns) & (some != _INT32_MIN)
        units += tl.sum(tl.where(moved, (prob * 1099511627776.0).to(tl.int64), 0), axis=0)
    return units


@triton.jit
def _mix(bits):
    """Source: Chris Wellons' "lowbias32", as in routing/counter_hash.py."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _random_bits(seed, counter):
    """Return the uint32 that routing/counter_hash.py gives for an int64 seed."""
    state = _mix(seed.to(tl.uint32) + 0x9E3779B9)
    state = _mix(state ^ (seed >> 32).to(tl.uint32))
    return _mix(state + counter.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _balanced_goes_up(count_E, expert, T, E, tile_m, WIDTH: tl.constexpr):
    """Return the choice of routing/token_rounding.py's closed form for one expert, and nothing of its neighbours'."""
    expert_W = tl.arange(0, WIDTH)
    count_W = tl.load(count_E + expert_W, mask=expert_W < E, other=0).to(tl.int64)
    total_W = tl.cumsum(count_W, axis=0)
    rounded_W = (2 * total_W + tile_m - 1) // (2 * tile_m)
    rounded_before_W = (2 * (total_W - count_W) + tile_m - 1) // (2 * tile_m)
    lo_W = count_W // tile_m * tile_m
    free_W = (lo_W < count_W) & (lo_W + tile_m <= T)
    wanted_W = rounded_W - rounded_before_W - lo_W // tile_m
    arrived_W = tl.cumsum(wanted_W - free_W.to(tl.int64), axis=0)
    most = 9223372036854775807
    here, before = expert_W == expert, expert_W == expert - 1
    least = tl.minimum(tl.min(tl.where(expert_W <= expert, arrived_W, most), axis=0), 0)
    least_before = tl.minimum(tl.min(tl.where(expert_W < expert, arrived_W, most), axis=0), 0)
    owed = tl.sum(tl.where(here, arrived_W, 0), axis=0) - least
    owed_before = tl.sum(tl.where(before, arrived_W, 0), axis=0) - least_before
    return tl.sum(tl.where(here, wanted_W, 0), axis=0) + owed_before - owed > 0


@triton.jit(do_not_specialize=["tile_m", "token_bits"])
def _find_margins(
    prob_ET,
    top_k_mask_ET,
    count_E,
    seed,
    margin_E3,
    T,
    E,
    tile_m,
    token_bits,
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    held: tl.constexpr,
):
    expert = tl.program_id(0)
    prob_T = prob_ET + expert.to(tl.int64) * T
    top_k_mask_T = top_k_mask_ET + expert.to(tl.int64) * T
    count = tl.load(count_E + expert).to(tl.int32)
    lo = count // tile_m * tile_m
    hi = tl.where(lo == count, lo, lo + tile_m)
    hi = tl.where(hi > T, lo, hi)
    if RULE == _NEAREST_SCORE:
        gains = tl.full((), 1, tl.int1)
        loses = tl.full((), 0, tl.int1)
        keys = _load_keys(prob_T, top_k_mask_T, 0, T, gains, BLOCK)
        num = tl.maximum(hi - count, 0)
        up_key, up_turns = _margin(keys, prob_T, top_k_mask_T, T, gains, num, token_bits, BLOCK, held)
        gained = _moved_units(prob_T, top_k_mask_T, T, gains, up_key, up_turns)
        keys = _load_keys(prob_T, top_k_mask_T, 0, T, loses, BLOCK)
        key, turns = _margin(keys, prob_T, top_k_mask_T, T, loses, count - lo, token_bits, BLOCK, held)
        adds = (gained < _moved_units(prob_T, top_k_mask_T, T, loses, key, turns)) & (hi > count)
        key = tl.where(adds, up_key, key)
        turns = tl.where(adds, up_turns, turns)
    else:
        if RULE == _NEAREST:
            goes_up = hi - count < count - lo
        elif RULE == _STOCHASTIC:
            bits = _random_bits(tl.load(seed).to(tl.int64), expert)
            goes_up = bits.to(tl.int64) * tile_m < (count - lo).to(tl.int64) * 4294967296
        elif RULE == _BALANCED:
            goes_up = _balanced_goes_up(count_E, expert, T, E, tile_m, WIDTH)
        else:
            goes_up = tl.full((), RULE == _UP, tl.int1)
        target = tl.where(goes_up, hi, lo)
        adds = target > count
        keys = _load_keys(prob_T, top_k_mask_T, 0, T, adds, BLOCK)
        num = tl.where(adds, target - count, count - target)
        key, turns = _margin(keys, prob_T, top_k_mask_T, T, adds, num, token_bits, BLOCK, held)
    tl.store(margin_E3 + expert * 3, adds.to(tl.int32))
    tl.store(margin_E3 + expert * 3 + 1, key)
    tl.store(margin_E3 + expert * 3 + 2, turns)


@triton.jit(do_not_specialize=["tokens"])
def _apply_margins(
    prob_ET,
    top_k_mask_ET,
    margin_E3,
    keep_TE,
    count_PE,
    T,
    E,
    tokens,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the kept pairs, and count them as plan.py does: this is also the first launch of the plan."""
    tile = tl.program_id(0)
    expert_W = tl.arange(0, WIDTH)
    is_expert = expert_W < E
    adds_W = tl.load(margin_E3 + expert_W * 3, mask=is_expert, other=0) != 0
    key_W = tl.load(margin_E3 + expert_W * 3 + 1, mask=is_expert, other=0)
    turns_W = tl.load(margin_E3 + expert_W * 3 + 2, mask=is_expert, other=0)
    count_W = tl.zeros((WIDTH,), dtype=tl.int32)
    for first in range(tile * tokens, (tile + 1) * tokens, CHUNK):
        token_C = first + tl.arange(0, CHUNK)
        exists = (token_C < T)[:, None] & is_expert[None, :]
        column_CW = expert_W.to(tl.int64)[None, :] * T + token_C[:, None]
        prob_CW = tl.load(prob_ET + column_CW, mask=exists, other=0.0)
        is_top_k = tl.load(top_k_mask_ET + column_CW, mask=exists, other=0) != 0
        keys_CW = _move_keys(prob_CW, is_top_k, adds_W[None, :])
        moved = _moved(keys_CW, token_C[:, None], T, adds_W[None, :], key_W[None, :], turns_W[None, :])
        moved = moved & (keys_CW != _INT32_MIN)
        keep_CW = (is_top_k != moved) & exists
        count_W += tl.sum(keep_CW.to(tl.int32), axis=0)
        tl.store(keep_TE + token_C.to(tl.int64)[:, None] * E + expert_W[None, :], keep_CW.to(tl.int8), mask=exists)
    tl.store(count_PE + tile * E + expert_W, count_W, mask=is_expert)
