"""Top-K routing: each token takes its K most probable experts, ties to the lower expert id.

On CUDA devices moe_kernels/triton/choice.py makes the same choice in one launch.
"""

import torch
from torch import Tensor

from moe_kernels.routing.build import plan_from_mask
from moe_kernels.routing.kinds import RoutingKind
from moe_kernels.routing.plan import Routing, row_capacity
from moe_kernels.routing.ranking import rank_keys


def route_top_k(choice_TE: Tensor, K: int) -> Routing:
    """Return the routing in which each token takes the K experts of highest ``choice_TE``, ties to the lower expert.

    ``choice_TE`` (floating point, compared in fp32) may be logits, probabilities or biased probabilities. The choice
    has no gradient.

    Raises: ValueError unless ``choice_TE`` is a floating (T, E) tensor and 1 <= K <= E.
    """
    check_choice(choice_TE, K)
    if choice_TE.is_cuda:
        from moe_kernels.triton import choice  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

        return top_k_routing(choice.choose(choice_TE.detach(), None, K, transposed=False).top_k_mask_TE, K)
    return top_k_routing(top_k_mask(choice_TE.detach(), K), K)


def top_k_routing(mask_TE: Tensor, K: int) -> Routing:
    """Return the routing that computes exactly the top-K choice, the boolean ``mask_TE``."""
    T, E = mask_TE.shape
    R = row_capacity(RoutingKind.top_k, T=T, E=E, K=K, tile_m=1)
    return Routing(plan=plan_from_mask(mask_TE, R=R), top_k_mask_TE=mask_TE, keep_TE=mask_TE)


def top_k_mask(value: Tensor, K: int) -> Tensor:
    """Return the boolean mask of the K highest values along the last dim, ties to the lower index."""
    winners = rank_keys(value).topk(K, dim=-1, sorted=False).indices
    return torch.zeros(value.shape, dtype=torch.bool, device=value.device).scatter_(-1, winners, True)


def check_choice(choice_TE: Tensor, K: int) -> None:
    """Raise ``ValueError`` unless ``choice_TE`` is a floating (T, E) tensor and 1 <= K <= E."""
    if choice_TE.dim() != 2 or not choice_TE.is_floating_point():
        raise ValueError(
            "routing needs floating-point probabilities of shape (T, E), "
            f"got {choice_TE.dtype} {tuple(choice_TE.shape)}"
        )
    if not 1 <= K <= choice_TE.shape[1]:
        raise ValueError(
            f"K={K} (model.moe.experts_per_token) must lie between 1 and E={choice_TE.shape[1]} (model.moe.num_experts)"
        )
