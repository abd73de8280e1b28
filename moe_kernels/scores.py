"""Scores of (token, expert) pairs and scores of rows, in plain torch, for the backends that are written in it.

The same as kernels: triton/scores.py.
"""

import torch
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan


def gather_scores(score_TE: Tensor, plan: RoutingPlan) -> Tensor:
    """Return score_R, the score of each row's pair."""
    return score_TE.flatten().index_select(0, _flat_pairs(plan))


def scatter_dscore(dscore_R: Tensor, plan: RoutingPlan) -> Tensor:
    """Return (T, E) gradients of the scores: the used rows' in their pairs' places, zero everywhere else."""
    is_used_R = torch.arange(plan.R, device=dscore_R.device) < plan.expert_offsets_E1[-1]
    dscore_TE = dscore_R.new_zeros(plan.T * plan.E)
    # Unused rows name the pair (0, 0), which may also be a real one: they add zero to it instead of overwriting it.
    dscore_TE.index_add_(0, _flat_pairs(plan), torch.where(is_used_R, dscore_R, 0.0))
    return dscore_TE.view(plan.T, plan.E)


def _flat_pairs(plan: RoutingPlan) -> Tensor:
    """Return the flat (T, E) position of each row's pair; T·E may exceed 32 bits."""
    return plan.token_R.long() * plan.E + plan.expert_R
