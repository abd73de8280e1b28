"""Token rounding: top-K routing whose count per expert is moved to a multiple of the tile.

docs/token_rounding.md states the six rules, the ranking and the clamp, with an example. Weights of pairs are not chosen
here: the caller's scores weigh whatever pairs are kept. On CUDA devices moe_kernels/triton/rounding.py computes the
same plan, bit for bit. Source: SonicMoE (arXiv 2512.14080), Algorithms 4 and 6.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.routing.build import plan_from_mask
from moe_kernels.routing.counter_hash import random_bits
from moe_kernels.routing.kinds import Rounding, RoutingKind
from moe_kernels.routing.plan import Routing, row_capacity
from moe_kernels.routing.ranking import INT64_MAX, rank_keys
from moe_kernels.routing.top_k import check_choice, top_k_mask


class _Columns(NamedTuple):
    """What the rules look at, one row per expert."""

    prob_ET: Tensor  # fp32
    key_ET: Tensor  # rank among all tokens
    top_k_mask_ET: Tensor
    count_E: Tensor  # f, the top-K pairs
    lo_E: Tensor  # the multiple of the tile at or below f
    hi_E: Tensor  # the multiple at or above f; lo where T tokens cannot fill it
    tile_m: int
    most: int  # no count moves by more than this


def route_token_rounding(
    prob_TE: Tensor,
    K: int,
    *,
    tile_m: int,
    rounding: Rounding,
    bias_E: Tensor | None = None,
    seed: int | Tensor | None = None,
) -> Routing:
    """Return top-K routing with every expert's count rounded to a multiple of ``tile_m`` by the rule ``rounding``.

    Within an expert every top-K pair outranks every other pair; drops take the lowest ``prob_TE``, pads the highest,
    compared in fp32, ties to the lower token. ``bias_E`` moves the top-K choice and nothing else. Counts never exceed
    ⌊T/tile_m⌋·tile_m, so fewer tokens than a tile give an empty plan. ``seed`` (an int or an integer tensor) is read by
    ``Rounding.stochastic`` only. The choice has no gradient.

    Raises: ValueError for shapes, K or tile_m out of range, or a missing seed.
    """
    check_choice(prob_TE, K)
    E = prob_TE.shape[1]
    if tile_m < 1:
        raise ValueError(f"tile_m={tile_m} (model.moe.routing.tile_m) must be at least 1")
    if bias_E is not None and bias_E.shape != (E,):
        raise ValueError(f"bias_E has shape {tuple(bias_E.shape)}, expected (E,) = {(E,)}")
    prob_TE = prob_TE.detach().float()
    if prob_TE.is_cuda:
        from moe_kernels.triton.rounding import choose_and_round  # noqa: PLC0415 - triton comes with CUDA builds alone

        return choose_and_round(prob_TE, K, tile_m=tile_m, rounding=rounding, bias_E=bias_E, seed=seed)
    return token_rounding_torch(prob_TE, K, tile_m=tile_m, rounding=rounding, bias_E=bias_E, seed=seed)


def token_rounding_torch(
    prob_TE: Tensor, K: int, *, tile_m: int, rounding: Rounding, bias_E: Tensor | None, seed: int | Tensor | None
) -> Routing:
    """Return what ``route_token_rounding`` does with checked arguments, in plain torch on any device."""
    T, E = prob_TE.shape
    top_k_mask_TE = top_k_mask(prob_TE if bias_E is None else prob_TE + bias_E.detach(), K)
    columns = _columns(prob_TE, top_k_mask_TE, tile_m)
    target_E = torch.where(_goes_up(columns, rounding, seed), columns.hi_E, columns.lo_E)
    keep_TE = (columns.top_k_mask_ET ^ _moved_pairs(columns, target_E)).t()
    R = row_capacity(RoutingKind.token_rounding, T=T, E=E, K=K, tile_m=tile_m, rounding=rounding)
    return Routing(plan=plan_from_mask(keep_TE, R=R), top_k_mask_TE=top_k_mask_TE, keep_TE=keep_TE)


def _columns(prob_TE: Tensor, top_k_mask_TE: Tensor, tile_m: int) -> _Columns:
    """Return the experts' columns of the problem, with the two counts each may be moved to."""
    T = prob_TE.shape[0]
    prob_ET, top_k_mask_ET = prob_TE.t().contiguous(), top_k_mask_TE.t().contiguous()
    count_E = top_k_mask_ET.sum(1)
    lo_E = count_E // tile_m * tile_m
    hi_E = torch.where(count_E == lo_E, lo_E, lo_E + tile_m)
    # At most T tokens can choose an expert, so rounding up may ask for rows that do not exist (70 tokens, tile 32: 96).
    hi_E = torch.where(hi_E > T, lo_E, hi_E)
    return _Columns(
        prob_ET=prob_ET,
        key_ET=rank_keys(prob_ET),
        top_k_mask_ET=top_k_mask_ET,
        count_E=count_E,
        lo_E=lo_E,
        hi_E=hi_E,
        tile_m=tile_m,
        most=min(tile_m - 1, T),
    )


def _goes_up(columns: _Columns, rounding: Rounding, seed: int | Tensor | None) -> Tensor:
    """Return the boolean (E,) choice of ``hi_E`` over ``lo_E``; where the two are equal it does not matter."""
    count_E, lo_E, hi_E, tile_m = columns.count_E, columns.lo_E, columns.hi_E, columns.tile_m
    match rounding:
        case Rounding.nearest:
            return hi_E - count_E < count_E - lo_E
        case Rounding.stochastic:
            # u/2³² < (f - lo)/tile, in integers.
            return random_bits(seed, count_E.shape[0], count_E.device) * tile_m < (count_E - lo_E) << 32
        case Rounding.nearest_score:
            # A clamped expert has hi below f; whatever it gains, its hi is its lo.
            gained_E = _moved_score(columns, (hi_E - count_E).clamp(min=0), adds=True)
            return gained_E < _moved_score(columns, count_E - lo_E, adds=False)
        case Rounding.balanced:
            return _balanced_goes_up(count_E, lo_E, hi_E, tile_m)
        case Rounding.up:
            return torch.ones_like(count_E, dtype=torch.bool)
        case Rounding.down:
            return torch.zeros_like(count_E, dtype=torch.bool)


def _balanced_goes_up(count_E: Tensor, lo_E: Tensor, hi_E: Tensor, tile_m: int) -> Tensor:
    """Return the choices of the ``balanced`` rule without visiting the experts one after another.

    The rule carries the signed deviation z of all experts so far and takes the side that leaves |z| smaller, a tie
    going down. While no count is clamped, that keeps the summed targets at the summed counts rounded to the tile, so
    the difference of two rounded sums says which side expert e takes. An expert that wants to go up but is clamped
    leaves a tile owed, which the next expert free to go up pays: a queue, and its length has a closed form.
    """
    total_E = count_E.cumsum(0)
    rounded_tiles_E = (2 * total_E + tile_m - 1) // (2 * tile_m)  # half a tile goes down
    wanted_E = rounded_tiles_E - F.pad(rounded_tiles_E, (1, -1)) - lo_E // tile_m  # 0 or 1 tile above lo
    free_E = (hi_E > lo_E).long()
    arrived_E = (wanted_E - free_E).cumsum(0)
    owed_E = arrived_E - arrived_E.cummin(0).values.clamp(max=0)
    return wanted_E + F.pad(owed_E, (1, -1)) - owed_E > 0


def _moved_score(columns: _Columns, num_E: Tensor, *, adds: bool) -> Tensor:
    """Return for each expert the summed probability of the first ``num_E`` pairs to move, in int64 units of 2⁻⁴⁰.

    Integers, because a floating sum depends on its order, which differs between devices, and the plan may not.
    """
    first = _move_keys(columns, torch.full_like(num_E, adds, dtype=torch.bool)).topk(columns.most, dim=-1).indices
    units = (columns.prob_ET.gather(1, first) * 2.0**40).long()
    return F.pad(units.cumsum(1), (1, 0)).gather(1, num_E[:, None]).squeeze(1)


def _moved_pairs(columns: _Columns, target_E: Tensor) -> Tensor:
    """Return the boolean (E, T) mask of the pairs added or dropped to bring every count to its target."""
    if columns.most == 0:  # tile 1: every count is a multiple already
        return torch.zeros_like(columns.top_k_mask_ET)
    change_E = target_E - columns.count_E
    key_ET = _move_keys(columns, change_E > 0)
    num_E1 = change_E.abs()[:, None]
    # Keys are distinct, so "at least as high as the n-th highest" is exactly n pairs.
    nth_E1 = key_ET.topk(columns.most, dim=-1).values.gather(1, (num_E1 - 1).clamp(min=0))
    return (key_ET >= nth_E1) & (num_E1 > 0)


def _move_keys(columns: _Columns, adds_E: Tensor) -> Tensor:
    """Return keys whose descending order is the order in which pairs move; -1 for pairs that cannot.

    Experts that add take the best pairs outside top-K first, the others drop the worst inside it first.
    """
    key_ET = columns.key_ET ^ torch.where(adds_E, 0, INT64_MAX)[:, None]
    return key_ET.masked_fill_(columns.top_k_mask_ET == adds_E[:, None], -1)
