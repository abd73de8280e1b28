"""Token rounding on the GPU: which tokens each expert adds or drops, found without a sort and without the host.

One program per expert looks at its own column. An expert adds or drops the first pairs of the order in which pairs
move; where that stretch ends is found by bisection: counting the keys at or above a trial value until the count is the
wanted one or, where equal keys meet, counting tokens at the one value left. The rules are those of
routing/token_rounding.py, in integers, so the plan is the same bits; docs/token_rounding.md states them. Device code is
rounding_kernels.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch
import triton
from torch import Tensor

from moe_kernels.operators import operator
from moe_kernels.routing.counter_hash import checked_seed
from moe_kernels.routing.kinds import Rounding, RoutingKind
from moe_kernels.routing.plan import Routing, row_capacity
from moe_kernels.triton.choice import choose
from moe_kernels.triton.plan import as_plan, empty_plan, write_plan
from moe_kernels.triton.rounding_kernels import RULES, round_columns_kernel

_HELD_TOKENS = 32768  # keys held in registers; those of tokens past them are read anew for every count
_READ_TOKENS = 8192
_KEYS_PER_THREAD = 64  # half of a thread's registers where 16 warps share a multiprocessor
_PER_LOAD = 16

RoundedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def choose_and_round(
    prob_TE: Tensor,
    K: int,
    *,
    tile_m: int,
    rounding: Rounding,
    bias_E: Tensor | None = None,
    seed: int | Tensor | None = None,
) -> Routing:
    """Return the routing of ``route_token_rounding``, whose arguments these are, made by the kernels."""
    chosen = choose(prob_TE, None if bias_E is None else bias_E.detach(), K, transposed=True)
    return round_choice(
        chosen.prob_ET,
        chosen.top_k_mask_TE,
        chosen.top_k_mask_ET,
        chosen.count_E,
        K=K,
        tile_m=tile_m,
        rounding=rounding,
        seed=seed,
    )


def round_choice(
    prob_ET: Tensor,
    top_k_mask_TE: Tensor,
    top_k_mask_ET: Tensor,
    count_BE: Tensor,
    *,
    K: int,
    tile_m: int,
    rounding: Rounding,
    seed: int | Tensor | None,
) -> Routing:
    """Return the routing of a top-K choice, given both ways round, with every expert's count moved to the tile.

    ``count_BE`` are the experts' top-K pairs, (E,) or by parts of the tokens (B, E), integers.

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
        prob_ET, top_k_mask_ET, count_BE, seed, tile_m, rounding.value, R
    )
    return Routing(as_plan(plan, T, E, R), top_k_mask_TE=top_k_mask_TE, keep_TE=keep_TE)


@operator("round_to_tiles")
def _round_to_tiles(
    prob_ET: Tensor, top_k_mask_ET: Tensor, count_BE: Tensor, seed: Tensor | None, tile_m: int, rounding: str, R: int
) -> RoundedTensors:
    """Return keep_TE and the five tensors of its plan after moving every expert's count to a multiple of the tile.

    ``prob_ET`` is fp32 and contiguous, ``seed`` is a zero-dimensional integer tensor that only ``stochastic`` reads,
    ``rounding`` a value of ``Rounding``.
    """
    E, T = prob_ET.shape
    keep_TE = torch.empty(T, E, dtype=torch.bool, device=prob_ET.device)
    keep_ET = torch.empty(E, T, dtype=torch.int8, device=prob_ET.device)
    if T > 0:
        rows, columns, num_warps = column_block(T)
        round_columns_kernel[(E,)](
            prob_ET,
            top_k_mask_ET.view(torch.int8),
            count_BE.contiguous(),
            count_BE if seed is None else seed,
            keep_ET,
            T,
            E,
            count_BE.numel() // E,
            tile_m,
            T.bit_length(),
            RULE=RULES.index(Rounding(rounding)),
            WIDTH=triton.next_power_of_2(E),
            ROWS=rows,
            COLUMNS=columns,
            READ_ROWS=max(1, _READ_TOKENS // columns),
            num_warps=num_warps,
        )
    return keep_TE, *write_plan(keep_ET, T, E, R=R, keep_TE=keep_TE.view(torch.int8))


@_round_to_tiles.register_fake
def _(
    prob_ET: Tensor, top_k_mask_ET: Tensor, count_BE: Tensor, seed: Tensor | None, tile_m: int, rounding: str, R: int
) -> RoundedTensors:
    E, T = prob_ET.shape
    return prob_ET.new_empty((T, E), dtype=torch.bool), *empty_plan(prob_ET, T, E, R)


def column_block(T: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of the block of keys that one program holds, each column in one thread."""
    held = max(16, triton.next_power_of_2(min(T, _HELD_TOKENS)))
    num_warps = min(16, max(4, held // (32 * _KEYS_PER_THREAD)))
    columns = min(held, 32 * num_warps * _PER_LOAD)
    return held // columns, columns, num_warps
