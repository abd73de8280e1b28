"""From the pairs to compute to a RoutingPlan: no host sync, shapes known before the numbers are.

On CUDA devices two launches of moe_kernels/triton/plan.py do it, with the same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan


def plan_from_mask(keep_TE: Tensor, *, R: int) -> RoutingPlan:
    """Return the plan that computes exactly the pairs of the boolean ``keep_TE``, in ``R`` allocated rows.

    ``R`` must bound the number of pairs (``plan.row_capacity``). Nothing here can look whether it does without waiting
    for the device; ``check_plan`` does look.
    """
    if keep_TE.is_cuda:
        from moe_kernels.triton import plan  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

        return plan.plan_from_mask(keep_TE, R=R)
    return plan_from_mask_torch(keep_TE, R=R)


def plan_from_mask_torch(keep_TE: Tensor, *, R: int) -> RoutingPlan:
    """Return what ``plan_from_mask`` does, in plain torch on any device."""
    T, E = keep_TE.shape
    keep_TE, keep_ET = keep_TE.contiguous(), keep_TE.t().contiguous()
    expert_token_R2 = torch.nonzero_static(keep_ET, size=R, fill_value=0)
    token_expert_R2 = torch.nonzero_static(keep_TE, size=R, fill_value=0)
    pairs_before_ET = keep_ET.flatten().cumsum(0, dtype=torch.int32).view(E, T)  # this pair included
    row_of_pair = pairs_before_ET.flatten() - 1  # meaningful at kept pairs
    # Unused entries look up pair (0, 0), whose row is 0 if kept and -1 if not; the plan promises 0.
    row_by_token_R = row_of_pair[token_expert_R2[:, 1] * T + token_expert_R2[:, 0]].clamp_(min=0)
    return RoutingPlan(
        token_R=expert_token_R2[:, 1].int(),
        expert_R=expert_token_R2[:, 0].int(),
        expert_offsets_E1=F.pad(pairs_before_ET[:, -1], (1, 0)),
        token_offsets_T1=F.pad(keep_TE.sum(1).cumsum(0, dtype=torch.int32), (1, 0)),
        row_by_token_R=row_by_token_R,
        T=T,
        E=E,
        R=R,
    )


def mask_from_experts(expert_TK: Tensor, E: int) -> Tensor:
    """Return the boolean (T, E) mask of the pairs named by integer expert ids; ids outside 0..E-1 name no pair."""
    expert_TK = expert_TK.long()
    foreign_TK = (expert_TK < 0) | (expert_TK >= E)
    # One more column takes the foreign ids, so that they are written beside the mask and cut off with it.
    mask_TE1 = torch.zeros(expert_TK.shape[0], E + 1, dtype=torch.bool, device=expert_TK.device)
    return mask_TE1.scatter_(1, expert_TK.masked_fill(foreign_TK, E), True)[:, :E]
