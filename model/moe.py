"""A layer of routed experts: it holds their weights, asks the router, and hands both to moe_kernels.

How the experts are computed, and on what hardware, is moe_kernels/; what the counts are for is losses.py and
training/metrics.py. Nothing is stored on the module: counts and sums are returned, so recomputing a layer in the
backward pass cannot count its tokens twice.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig, MoEConfig
from model.router import Routed, Router
from moe_kernels import Backend, MoEProblem, RoutingKind, arch_of, moe_experts


class MoEStats(NamedTuple):
    """What one layer's router did with one micro-batch; the decoder stacks these on a new leading dimension L."""

    top_k_count_BE: Tensor  # int64, pairs chosen by top-K before rounding, per sequence; no gradient
    prob_sum_BE: Tensor  # fp32, differentiable: sum over a sequence's tokens of probabilities that sum to 1 per token
    z_sum: Tensor  # fp32 scalar, differentiable: sum over tokens of logsumexp(logits)^2
    entropy_sum: Tensor  # fp32 scalar, no gradient: sum over tokens of the router's entropy in nats
    logit_max: Tensor  # fp32 scalar, no gradient
    row_count_E: Tensor  # int64, rows per expert after rounding
    pairs_added: Tensor  # int64 scalar, kept pairs outside the top-K choice
    pairs_dropped: Tensor  # int64 scalar, top-K pairs not kept
    tokens_without_expert: Tensor  # int64 scalar


class MoE(nn.Module):
    """E routed experts; every one is a SwiGLU MLP of width N.

    ``w_gate_up`` is (E, 2N, D) with the N gate rows before the N up rows; ``w_down`` is (E, D, N).
    """

    def __init__(self, config: MoEConfig, *, width: int, backend: Backend, recompute_h: bool) -> None:
        super().__init__()
        self.router = Router(config, width=width)
        self.w_gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_width, width))
        self.w_down = nn.Parameter(torch.empty(config.num_experts, width, config.expert_width))
        self.backend = backend
        self.recompute_h = recompute_h

    def forward(self, x_BSD: Tensor, *, routing: RoutingKind, seed: int | Tensor | None) -> tuple[Tensor, MoEStats]:
        """Return the experts' weighted sum per token, (B, S, D), and what the router did."""
        x_TD = x_BSD.flatten(0, 1)
        routed = self.router(x_TD, routing=routing, seed=seed, num_sequences=x_BSD.shape[0])
        out_TD = moe_experts(
            x_TD,
            self.w_gate_up,
            self.w_down,
            routed.score_TE,
            routed.routing.plan,
            backend=self.backend,
            recompute_h=self.recompute_h,
        )
        return out_TD.view_as(x_BSD), moe_stats(routed)


def moe_stats(routed: Routed) -> MoEStats:
    """Return counts and sums of a routed micro-batch; only ``prob_sum_BE`` and ``z_sum`` carry gradients."""
    plan = routed.routing.plan
    row_count_E = plan.expert_offsets_E1.diff().long()
    keep_TE, top_k_mask_TE = routed.routing.keep_TE, routed.routing.top_k_mask_TE
    if keep_TE is top_k_mask_TE:  # top-K routing, which has nothing to count
        pairs_added, pairs_dropped = row_count_E.new_zeros(()), row_count_E.new_zeros(())
    else:
        pairs_added = (keep_TE > top_k_mask_TE).sum()
        # Of the masks only one comparison is made: they are large, and the plan's offsets say the rest.
        pairs_dropped = pairs_added + routed.sums.top_k_count_BE.sum() - row_count_E.sum()
    return MoEStats(
        *routed.sums,
        row_count_E=row_count_E,
        pairs_added=pairs_added,
        pairs_dropped=pairs_dropped,
        tokens_without_expert=(plan.token_offsets_T1.diff() == 0).sum(),
    )


def moe_problem(config: ModelConfig, *, tokens: int, dtype: torch.dtype, device: torch.device) -> MoEProblem:
    """Return the problem that a backend is chosen for: one layer's shape at ``tokens`` tokens per micro-batch."""
    routing = config.moe.routing
    return MoEProblem(
        T=tokens,
        D=config.width,
        N=config.moe.expert_width,
        E=config.moe.num_experts,
        K=config.moe.experts_per_token,
        tile_m=routing.tile_m if routing.train is RoutingKind.token_rounding else 1,
        routing=routing.train,
        dtype=dtype,
        arch=arch_of(device),
    )
