"""RoutingPlan: which token feeds which expert row, and what must hold of it.

How pairs are chosen: top_k.py, token_rounding.py, expert_choice.py. How a choice becomes a plan: build.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.routing.kinds import Rounding, RoutingKind


@dataclass(frozen=True)
class RoutingPlan:
    """Which token feeds which expert row. Rows are sorted by expert, then by token.

    Only rows before ``expert_offsets_E1[-1]`` are used; that number stays on the device. Unused entries of ``token_R``,
    ``expert_R`` and ``row_by_token_R`` hold 0: safe to gather from, and no output may depend on what they gather.
    All tensors are int32 on one device.
    """

    token_R: Tensor  # source token of each row
    expert_R: Tensor  # expert of each row
    expert_offsets_E1: Tensor  # expert e owns rows [e], [e + 1)
    token_offsets_T1: Tensor  # token t owns entries [t], [t + 1) of row_by_token_R
    row_by_token_R: Tensor  # rows grouped by token; within a token by expert
    T: int
    E: int
    R: int  # rows allocated


class Routing(NamedTuple):
    """What a routing function returns: the plan, and the masks that losses and metrics count."""

    plan: RoutingPlan
    top_k_mask_TE: Tensor  # bool, each token's K choices before any rounding
    keep_TE: Tensor  # bool, the pairs that the plan computes


def row_capacity(routing: RoutingKind, *, T: int, E: int, K: int, tile_m: int, rounding: Rounding = Rounding.up) -> int:
    """Return the rows to allocate: the most that the routing can use. The number in use stays on the device.

    ``tile_m`` and ``rounding`` are read for token rounding only; ``Rounding.up`` bounds every rule.
    """
    if routing is RoutingKind.top_k:
        return T * K
    if routing is RoutingKind.expert_choice:
        return E * expert_choice_count(T=T, E=E, K=K)
    match rounding:
        case Rounding.down:
            return T * K
        case Rounding.balanced:
            return T * K + tile_m // 2  # the carried deviation never exceeds half a tile upwards
        case Rounding.nearest:
            return T * K + E * ((tile_m - 1) // 2)
        case _:
            return T * K + E * (tile_m - 1)


def expert_choice_count(*, T: int, E: int, K: int) -> int:
    """Return how many tokens each expert takes under expert choice: ⌊T·K/E⌋, which K <= E keeps within T."""
    return T * K // E


def check_plan(plan: RoutingPlan, keep_TE: Tensor | None = None) -> None:
    """Raise ``ValueError`` unless ``plan`` holds its invariants and computes exactly ``keep_TE``, if that is given.

    Reads the tensors on the host, so it is for tests and debugging and never part of a step.
    """
    T, E, R = plan.T, plan.E, plan.R
    shapes = {
        "token_R": (R,),
        "expert_R": (R,),
        "expert_offsets_E1": (E + 1,),
        "token_offsets_T1": (T + 1,),
        "row_by_token_R": (R,),
    }
    values = {}
    for name, shape in shapes.items():
        tensor = getattr(plan, name)
        if tensor.shape != shape or tensor.dtype is not torch.int32:
            raise ValueError(
                f"plan.{name} is {tensor.dtype} {tuple(tensor.shape)}, expected torch.int32 {shape} for "
                f"T={T}, E={E}, R={R}"
            )
        values[name] = tensor.detach().cpu().long()
    used = _check_offsets(values["expert_offsets_E1"], values["token_offsets_T1"], R)
    token_R, expert_R, row_by_token_R = values["token_R"], values["expert_R"], values["row_by_token_R"]
    if token_R[used:].any() or expert_R[used:].any() or row_by_token_R[used:].any():
        raise ValueError(f"unused entries (from {used} on) of token_R, expert_R and row_by_token_R must hold 0")
    counts_E = values["expert_offsets_E1"].diff()
    if not torch.equal(expert_R[:used], torch.arange(E).repeat_interleave(counts_E)):
        raise ValueError("expert_R disagrees with expert_offsets_E1")
    if used and (int(token_R.min()) < 0 or int(token_R.max()) >= T):
        raise ValueError(f"token_R holds ids outside 0..{T - 1}")
    pair = expert_R[:used] * T + token_R[:used]
    if not bool((pair.diff() > 0).all()):
        raise ValueError("rows are not in order of (expert, token), or a pair occurs twice")
    token_by_entry = torch.arange(T).repeat_interleave(values["token_offsets_T1"].diff())
    # Sorting rows by token, stably, keeps the experts of a token in order: that is the order promised.
    order = token_R[:used].argsort(stable=True)
    if not torch.equal(row_by_token_R[:used], order) or not torch.equal(token_R[order], token_by_entry):
        raise ValueError("row_by_token_R and token_offsets_T1 do not list each token's rows in order of expert")
    if keep_TE is not None:
        planned_TE = torch.zeros(T, E, dtype=torch.bool)
        planned_TE[token_R[:used], expert_R[:used]] = True
        if not torch.equal(planned_TE, keep_TE.cpu()):
            raise ValueError("the plan computes other pairs than keep_TE")


def _check_offsets(expert_offsets_E1: Tensor, token_offsets_T1: Tensor, R: int) -> int:
    """Return the used rows, or raise ``ValueError`` if the offsets do not partition them."""
    for name, offsets in (("expert_offsets_E1", expert_offsets_E1), ("token_offsets_T1", token_offsets_T1)):
        if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            raise ValueError(f"{name} must start at 0 and never fall")
    used = int(expert_offsets_E1[-1])
    if used > R:
        raise ValueError(f"the plan uses {used} rows but only R={R} are allocated: the row capacity is too small")
    if int(token_offsets_T1[-1]) != used:
        raise ValueError(f"experts own {used} rows but tokens own {int(token_offsets_T1[-1])}")
    return used
