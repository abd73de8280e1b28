"""Every routing as loops over Python numbers: what the vectorised routings and plan builders must agree with, exactly.

Nothing but ``row_capacity`` is shared with them, so that a mistake has to be made twice to go unseen.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from moe_kernels.routing.kinds import Rounding, RoutingKind
from moe_kernels.routing.plan import Routing, RoutingPlan, row_capacity


def route_ref(
    prob_TE: Tensor,
    K: int,
    routing: RoutingKind,
    *,
    tile_m: int = 1,
    rounding: Rounding = Rounding.nearest,
    bias_E: Tensor | None = None,
    seed: int = 0,
) -> Routing:
    """Return the routing of fp32 ``prob_TE`` (no NaN), pair by pair on the host; ``plan_ref`` makes its plan."""
    T, E = prob_TE.shape
    prob = prob_TE.float().tolist()
    choice = prob if bias_E is None else (prob_TE.float() + bias_E).tolist()
    chosen = [set(_ranked(choice[t])[:K]) for t in range(T)]
    top_k = [{t for t in range(T) if e in chosen[t]} for e in range(E)]
    kept: list[set[int]] = []
    deviation = 0
    for e in range(E):
        column = [prob[t][e] for t in range(T)]
        if routing is RoutingKind.top_k:
            kept.append(top_k[e])
        elif routing is RoutingKind.expert_choice:
            kept.append(set(_ranked(column)[: T * K // E]))
        else:
            ranked = _ranked(column, first=top_k[e])  # every top-K pair outranks every other
            random = _hash(seed, e) if rounding is Rounding.stochastic else 0
            target = _target(
                [column[t] for t in ranked],
                len(top_k[e]),
                tile_m=tile_m,
                rounding=rounding,
                random=random,
                deviation=deviation,
            )
            deviation += target - len(top_k[e])
            kept.append(set(ranked[:target]))
    keep_TE, top_k_TE = _mask(kept, T), _mask(top_k, T)
    R = row_capacity(routing, T=T, E=E, K=K, tile_m=tile_m, rounding=rounding)
    return Routing(plan=plan_ref(keep_TE, R=R), top_k_mask_TE=top_k_TE, keep_TE=keep_TE)


def plan_ref(keep_TE: Tensor, *, R: int) -> RoutingPlan:
    """Return the plan of ``keep_TE`` in ``R`` allocated rows, pair by pair on the host."""
    T, E = keep_TE.shape
    keep = keep_TE.tolist()
    pairs = [(e, t) for e in range(E) for t in range(T) if keep[t][e]]
    rows_by_token = [[row for row, (_, token) in enumerate(pairs) if token == t] for t in range(T)]

    def padded(values: list[int]) -> Tensor:
        return torch.tensor(values + [0] * (R - len(values)), dtype=torch.int32)

    def offsets(counts: list[int]) -> Tensor:
        return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)

    return RoutingPlan(
        token_R=padded([t for _, t in pairs]),
        expert_R=padded([e for e, _ in pairs]),
        expert_offsets_E1=offsets([sum(keep[t][e] for t in range(T)) for e in range(E)]),
        token_offsets_T1=offsets([len(rows) for rows in rows_by_token]),
        row_by_token_R=padded([row for rows in rows_by_token for row in rows]),
        T=T,
        E=E,
        R=R,
    )


def _target(column: list[float], count: int, *, tile_m: int, rounding: Rounding, random: int, deviation: int) -> int:
    """Return the count that an expert is moved to; ``column`` holds its probabilities in rank order."""
    lo = count - count % tile_m
    hi = lo if lo == count else lo + tile_m
    if hi > len(column) // tile_m * tile_m:
        return lo
    match rounding:
        case Rounding.nearest:
            goes_up = hi - count < count - lo
        case Rounding.stochastic:
            goes_up = random * tile_m < (count - lo) * 2**32
        case Rounding.nearest_score:
            gained = sum(int(p * 2**40) for p in column[count:hi])
            lost = sum(int(p * 2**40) for p in column[lo:count])
            goes_up = gained < lost
        case Rounding.balanced:
            goes_up = abs(hi - count + deviation) < abs(lo - count + deviation)
        case Rounding.up:
            goes_up = True
        case Rounding.down:
            goes_up = False
    return hi if goes_up else lo


def _hash(seed: int, counter: int) -> int:
    """Return 32 bits of (seed, counter)."""

    def mix(bits: int) -> int:
        bits ^= bits >> 16
        bits = bits * 0x7FEB352D % 2**32
        bits ^= bits >> 15
        bits = bits * 0x846CA68B % 2**32
        return bits ^ bits >> 16

    low, high = seed % 2**32, (seed >> 32) % 2**32
    return mix((mix(mix((low + 0x9E3779B9) % 2**32) ^ high) + counter * 0x9E3779B9) % 2**32)


def _ranked(values: list[float], *, first: Collection[int] = ()) -> list[int]:
    """Return the indices of ``values``, those of ``first`` before all others, then high before low, then in order."""
    return sorted(range(len(values)), key=lambda i: (i not in first, -values[i], i))


def _mask(tokens_by_expert: list[set[int]], T: int) -> Tensor:
    """Return the boolean (T, E) mask of the listed pairs."""
    mask_TE = torch.zeros(T, len(tokens_by_expert), dtype=torch.bool)
    for expert, tokens in enumerate(tokens_by_expert):
        mask_TE[sorted(tokens), expert] = True
    return mask_TE
