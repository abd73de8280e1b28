"""Expert choice: each expert takes its most probable tokens. A baseline for research only.

Whether a token is taken depends on every other token of the micro-batch, later ones too, so a model trained with it
sees the future and cannot generate. Source: Zhou et al., "Mixture-of-Experts with Expert Choice Routing" (2202.09368).
"""

from torch import Tensor

from moe_kernels.routing.build import plan_from_mask
from moe_kernels.routing.kinds import RoutingKind
from moe_kernels.routing.plan import Routing, expert_choice_count, row_capacity
from moe_kernels.routing.top_k import check_choice, top_k_mask


def route_expert_choice(prob_TE: Tensor, K: int) -> Routing:
    """Return the routing in which each expert takes its ⌊T·K/E⌋ most probable tokens, ties to the lower token.

    ``top_k_mask_TE`` is still each token's top-K choice, so that load metrics mean the same under every routing. The
    choice has no gradient. Raises: ValueError as ``route_top_k``.
    """
    check_choice(prob_TE, K)
    T, E = prob_TE.shape
    prob_TE = prob_TE.detach()
    keep_TE = top_k_mask(prob_TE.t(), expert_choice_count(T=T, E=E, K=K)).t()
    R = row_capacity(RoutingKind.expert_choice, T=T, E=E, K=K, tile_m=1)
    return Routing(plan=plan_from_mask(keep_TE, R=R), top_k_mask_TE=top_k_mask(prob_TE, K), keep_TE=keep_TE)
