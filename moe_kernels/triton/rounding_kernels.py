"""Device code of rounding.py: an expert's column of keys, the place in it where moving ends, and the pairs kept.

A key is a probability's bits, turned so that what moves first is highest. The first ROWS · COLUMNS keys of a column are
held in registers; those of the tokens past them are read anew whenever keys are counted.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import triton
import triton.language as tl

from moe_kernels.routing.kinds import Rounding
from moe_kernels.triton.choice import ordered_bits

RULES = list(Rounding)
_NEAREST = tl.constexpr(RULES.index(Rounding.nearest))
_STOCHASTIC = tl.constexpr(RULES.index(Rounding.stochastic))
_NEAREST_SCORE = tl.constexpr(RULES.index(Rounding.nearest_score))
_BALANCED = tl.constexpr(RULES.index(Rounding.balanced))
_UP = tl.constexpr(RULES.index(Rounding.up))
_INT32_MIN = tl.constexpr(-(2**31))
_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _load_keys(prob_T, top_k_mask_T, first, T, adds, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return int32 keys that fall in the order in which pairs move; the lowest int32 for what cannot move."""
    token = _tokens(first, ROWS, COLUMNS)
    ordered = ordered_bits(tl.load(prob_T + token, mask=token < T, other=0.0))
    is_top_k = tl.load(top_k_mask_T + token, mask=token < T, other=0) != 0
    key = tl.maximum(tl.where(adds, ordered, ordered ^ -1), _INT32_MIN + 1)
    return tl.where((is_top_k != adds) & (token < T), key, _INT32_MIN)


@triton.jit
def _tokens(first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return first + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _has_turn(first, T, adds, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return whether a token is among the first ``turns`` where equal keys move: pads from below, drops from above."""
    token = _tokens(first, ROWS, COLUMNS)
    return (token >= tl.where(adds, 0, T - turns)) & (token < tl.where(adds, turns, T))


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, axis=0), axis=0)


@triton.jit
def _count(keys, prob_T, top_k_mask_T, T, adds, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr):
    """Return how many keys are ``least`` or above."""
    count = _sum((keys >= least).to(tl.int32))
    for first in range(ROWS * COLUMNS, T, READ * COLUMNS):
        more = _load_keys(prob_T, top_k_mask_T, first, T, adds, READ, COLUMNS)
        count += _sum((more >= least).to(tl.int32))
    return count


@triton.jit
def _count_equal(
    keys, prob_T, top_k_mask_T, T, adds, key, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr
):
    """Return how many keys equal ``key`` and move before the turn."""
    count = _sum(((keys == key) & _has_turn(0, T, adds, turns, ROWS, COLUMNS)).to(tl.int32))
    for first in range(ROWS * COLUMNS, T, READ * COLUMNS):
        more = _load_keys(prob_T, top_k_mask_T, first, T, adds, READ, COLUMNS)
        count += _sum(((more == key) & _has_turn(first, T, adds, turns, READ, COLUMNS)).to(tl.int32))
    return count


@triton.jit
def _best_of_threads(keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the highest key of each ROWS · 16: with 16 mask bytes in a load, those are the keys of one thread."""
    return tl.max(tl.reshape(tl.max(keys, axis=0), (COLUMNS // 16, 16)), axis=1)


@triton.jit
def _bracket(keys, prob_T, top_k_mask_T, T, adds, ROWS: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr):
    """Return the highest key, and the lowest of the threads' highest keys: a first trial value.

    With as many threads as keys are to be found, or more, all of those are at or above it, and few others are.
    """
    best = _best_of_threads(keys, ROWS, COLUMNS)
    for first in range(ROWS * COLUMNS, T, READ * COLUMNS):
        more = _load_keys(prob_T, top_k_mask_T, first, T, adds, READ, COLUMNS)
        best = tl.maximum(best, _best_of_threads(more, READ, COLUMNS))
    return tl.max(best, axis=0), tl.min(tl.where(best == _INT32_MIN, _INT32_MAX, best), axis=0)


@triton.jit
def _margin(
    keys, prob_T, top_k_mask_T, T, adds, num, token_bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr
):
    """Return (key, turns): the first ``num`` pairs to move are those above the key, and those at it before the turn."""
    top, trial = _bracket(keys, prob_T, top_k_mask_T, T, adds, ROWS, COLUMNS, READ)
    # At least num keys are low or above, fewer are high or above; in 64 bits, because high may be one past the highest.
    low, high = tl.full((), _INT32_MIN + 1, tl.int64), top.to(tl.int64) + 1
    at_low = tl.full((), 1, tl.int32) + T  # not counted yet
    trial = trial.to(tl.int64)
    if num == 0:
        low = high
    while (at_low != num) & (high - low > 1):
        count = _count(keys, prob_T, top_k_mask_T, T, adds, trial.to(tl.int32), ROWS, COLUMNS, READ)
        low, at_low = tl.where(count >= num, trial, low), tl.where(count >= num, count, at_low)
        high = tl.where(count >= num, high, trial)
        trial = (low + high) >> 1
    key, turns = low.to(tl.int32), tl.full((), 0, tl.int32) + T
    if num == 0:
        key, turns = top, tl.full((), 0, tl.int32)
    elif at_low != num:
        above = _count(keys, prob_T, top_k_mask_T, T, adds, key, ROWS, COLUMNS, READ)
        equal = _count_equal(keys, prob_T, top_k_mask_T, T, adds, key, T, ROWS, COLUMNS, READ)
        wanted = num - (above - equal)
        if wanted < equal:
            turns = tl.full((), 0, tl.int32)
            for i in range(token_bits):
                more = turns + (tl.full((), 1, tl.int32) << (token_bits - 1 - i))
                count = _count_equal(keys, prob_T, top_k_mask_T, T, adds, key, more, ROWS, COLUMNS, READ)
                turns = tl.where(count <= wanted, more, turns)
    return key, turns


@triton.jit
def _moved(keys, first, T, adds, key, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at_key = (keys == key) & _has_turn(first, T, adds, turns, ROWS, COLUMNS)
    return ((keys > key) | at_key) & (keys != _INT32_MIN)


@triton.jit
def _units(keys, first, T, adds, key, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the summed probability of the pairs that move, each truncated to units of 2⁻⁴⁰."""
    ordered = tl.where(adds, keys, keys ^ -1)
    prob = (((ordered >> 31) & 0x7FFFFFFF) ^ ordered).to(tl.float32, bitcast=True)
    units = (prob * 1099511627776.0).to(tl.int64)
    return _sum(tl.where(_moved(keys, first, T, adds, key, turns, ROWS, COLUMNS), units, 0))


@triton.jit
def _moved_units(
    keys, prob_T, top_k_mask_T, T, adds, key, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr
):
    units = _units(keys, 0, T, adds, key, turns, ROWS, COLUMNS)
    for first in range(ROWS * COLUMNS, T, READ * COLUMNS):
        more = _load_keys(prob_T, top_k_mask_T, first, T, adds, READ, COLUMNS)
        units += _units(more, first, T, adds, key, turns, READ, COLUMNS)
    return units


@triton.jit
def _store_kept(keep_T, keys, first, T, adds, key, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write which pairs are kept: the top-K choice, with the pairs that move on the other side."""
    token = _tokens(first, ROWS, COLUMNS)
    is_top_k = (keys != _INT32_MIN) != adds
    keep = is_top_k != _moved(keys, first, T, adds, key, turns, ROWS, COLUMNS)
    tl.store(keep_T + token, keep.to(tl.int8), mask=token < T)


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
def _balanced_goes_up(count_BE, num_parts, expert, T, E, tile_m, WIDTH: tl.constexpr):
    """Return the choice of routing/token_rounding.py's closed form for one expert, and nothing of its neighbours'."""
    expert_W = tl.arange(0, WIDTH)
    count_W = tl.zeros((WIDTH,), dtype=tl.int64)
    for part in range(num_parts):
        count_W += tl.load(count_BE + part * E + expert_W, mask=expert_W < E, other=0).to(tl.int64)
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


@triton.jit(do_not_specialize=["num_parts", "tile_m", "token_bits"])
def round_columns_kernel(
    prob_ET,
    top_k_mask_ET,
    count_BE,
    seed,
    keep_ET,
    T,
    E,
    num_parts,
    tile_m,
    token_bits,
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    READ_ROWS: tl.constexpr,
):
    """Write one expert's column of kept pairs after its count is moved to a multiple of the tile."""
    expert = tl.program_id(0)
    prob_T = prob_ET + expert.to(tl.int64) * T
    top_k_mask_T = top_k_mask_ET + expert.to(tl.int64) * T
    keep_T = keep_ET + expert.to(tl.int64) * T
    count = tl.full((), 0, tl.int32)
    for part in range(num_parts):
        count += tl.load(count_BE + part * E + expert).to(tl.int32)
    lo = count // tile_m * tile_m
    hi = tl.where(lo == count, lo, lo + tile_m)
    hi = tl.where(hi > T, lo, hi)
    if RULE == _NEAREST_SCORE:
        key, turns, units = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        adds = tl.full((), 0, tl.int1)
        for side in range(2):
            gains = side == 1
            num = tl.where(gains, tl.maximum(hi - count, 0), count - lo)
            keys = _load_keys(prob_T, top_k_mask_T, 0, T, gains, ROWS, COLUMNS)
            new_key, new_turns = _margin(
                keys, prob_T, top_k_mask_T, T, gains, num, token_bits, ROWS, COLUMNS, READ_ROWS
            )
            new_units = _moved_units(keys, prob_T, top_k_mask_T, T, gains, new_key, new_turns, ROWS, COLUMNS, READ_ROWS)
            adds = gains & (new_units < units) & (hi > count)
            key = tl.where(gains & (adds == 0), key, new_key)
            turns = tl.where(gains & (adds == 0), turns, new_turns)
            units = new_units
        keys = _load_keys(prob_T, top_k_mask_T, 0, T, adds, ROWS, COLUMNS)
    else:
        if RULE == _NEAREST:
            goes_up = hi - count < count - lo
        elif RULE == _STOCHASTIC:
            bits = _random_bits(tl.load(seed).to(tl.int64), expert)
            goes_up = bits.to(tl.int64) * tile_m < (count - lo).to(tl.int64) * 4294967296
        elif RULE == _BALANCED:
            goes_up = _balanced_goes_up(count_BE, num_parts, expert, T, E, tile_m, WIDTH)
        else:
            goes_up = tl.full((), RULE == _UP, tl.int1)
        target = tl.where(goes_up, hi, lo)
        adds = target > count
        num = tl.where(adds, target - count, count - target)
        keys = _load_keys(prob_T, top_k_mask_T, 0, T, adds, ROWS, COLUMNS)
        key, turns = _margin(keys, prob_T, top_k_mask_T, T, adds, num, token_bits, ROWS, COLUMNS, READ_ROWS)
    _store_kept(keep_T, keys, 0, T, adds, key, turns, ROWS, COLUMNS)
    for first in range(ROWS * COLUMNS, T, READ_ROWS * COLUMNS):
        more = _load_keys(prob_T, top_k_mask_T, first, T, adds, READ_ROWS, COLUMNS)
        _store_kept(keep_T, more, first, T, adds, key, turns, READ_ROWS, COLUMNS)
