"""The router: which experts a token gets, and how much each of them weighs.

Logits and everything made from them are fp32 whatever the model's dtype: bf16 logits tie often, and ties change the
routing. Which pairs are kept, given the probabilities, is moe_kernels/routing/; losses over them are in losses.py. On
CUDA devices one kernel of moe_kernels/triton/router.py makes weights, choice and sums of fp32 logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.config import MoEConfig, RouterKind
from model.wide_product import multiplies_as_is, wide_product
from moe_kernels import Routing, RoutingKind, route_expert_choice, route_token_rounding, route_top_k
from moe_kernels.routing.top_k import top_k_routing


class RouterSums(NamedTuple):
    """Sums over the tokens of each sequence (B) or of all; only ``prob_sum_BE`` and ``z_sum`` carry gradients."""

    top_k_count_BE: Tensor  # int64, pairs chosen by top-K before rounding
    prob_sum_BE: Tensor  # fp32, of probabilities that sum to 1 for each token
    z_sum: Tensor  # fp32, of logsumexp(logits)²
    entropy_sum: Tensor  # fp32, nats
    logit_max: Tensor  # fp32


class Routed(NamedTuple):
    """What a router says about one micro-batch."""

    score_TE: Tensor  # fp32, weight of every pair, kept or not; differentiable
    routing: Routing
    logits_TE: Tensor  # fp32
    prob_TE: Tensor | None  # fp32; each token's sum to 1, for the sigmoid router too; None where a kernel summed them
    sums: RouterSums


class Router(nn.Module):
    """A linear map to E logits, a softmax or sigmoid over them, and the choice of experts."""

    weight: nn.Parameter
    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.router is RouterKind.sigmoid else None
        self.register_buffer("expert_bias", bias_E)

    def forward(
        self, x_TD: Tensor, *, routing: RoutingKind, seed: int | Tensor | None, num_sequences: int = 1
    ) -> Routed:
        """Return the weights of all pairs, the pairs that ``routing`` keeps, and sums per sequence.

        A pair weighs p[t, e] / z[t] · routed_scale: z[t] is the token's top-K mass if ``normalize_top_k``, else 1.
        This holds for pairs that rounding adds too, and nothing is divided again after rounding.
        The tokens are ``num_sequences`` sequences of equal length, one after another.
        ``seed`` is read by stochastic rounding alone. Gradients reach the probabilities, never the choice.
        Source: sigmoid router and balancing bias: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
        """
        logits_TE = router_logits(x_TD, self.weight)
        if logits_TE.is_cuda and logits_TE.dtype is torch.float32:
            return self._routed_by_kernels(logits_TE, routing=routing, seed=seed, num_sequences=num_sequences)
        if self.config.router is RouterKind.softmax:
            affinity_TE = prob_TE = logits_TE.softmax(dim=-1)
        else:
            affinity_TE = logits_TE.sigmoid()
            prob_TE = affinity_TE / _mass(affinity_TE)
        chosen = self._choose(affinity_TE.detach(), routing=routing, seed=seed)
        score_TE = affinity_TE
        if self.config.normalize_top_k:
            score_TE = score_TE / _mass(affinity_TE * chosen.top_k_mask_TE)
        if self.config.routed_scale != 1.0:
            score_TE = score_TE * self.config.routed_scale
        sums = router_sums(logits_TE, prob_TE, chosen.top_k_mask_TE, num_sequences=num_sequences)
        return Routed(score_TE, chosen, logits_TE, prob_TE, sums)

    def _routed_by_kernels(
        self, logits_TE: Tensor, *, routing: RoutingKind, seed: int | Tensor | None, num_sequences: int
    ) -> Routed:
        from moe_kernels.triton import rounding, router  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

        config = self.config
        weighed = router.weigh_and_choose(
            logits_TE,
            None if routing is RoutingKind.expert_choice else self.expert_bias,  # whose top-K choice has no bias
            K=config.experts_per_token,
            num_sequences=num_sequences,
            sigmoid=config.router is RouterKind.sigmoid,
            normalize=config.normalize_top_k,
            scale=config.routed_scale,
            transposed=routing is not RoutingKind.top_k,
        )
        if routing is RoutingKind.token_rounding:
            chosen = rounding.round_choice(
                weighed.prob_ET,
                weighed.top_k_mask_TE,
                weighed.top_k_mask_ET,
                weighed.top_k_count_BE,
                K=config.experts_per_token,
                tile_m=config.routing.tile_m,
                rounding=config.routing.rounding,
                seed=seed,
            )
        elif routing is RoutingKind.expert_choice:
            chosen = route_expert_choice(weighed.prob_ET.t(), config.experts_per_token)
        else:
            chosen = top_k_routing(weighed.top_k_mask_TE, config.experts_per_token)
        sums = RouterSums(
            top_k_count_BE=weighed.top_k_count_BE,
            prob_sum_BE=weighed.prob_sum_BE,
            z_sum=weighed.z_sum,
            entropy_sum=weighed.entropy_sum,
            logit_max=weighed.logit_max,
        )
        return Routed(weighed.score_TE, chosen, logits_TE, None, sums)

    def _choose(self, affinity_TE: Tensor, *, routing: RoutingKind, seed: int | Tensor | None) -> Routing:
        K = self.config.experts_per_token
        if routing is RoutingKind.token_rounding:
            return route_token_rounding(
                affinity_TE,
                K,
                tile_m=self.config.routing.tile_m,
                rounding=self.config.routing.rounding,
                bias_E=self.expert_bias,
                seed=seed,
            )
        if routing is RoutingKind.expert_choice:
            return route_expert_choice(affinity_TE, K)
        return route_top_k(affinity_TE if self.expert_bias is None else affinity_TE + self.expert_bias, K)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move or cast the parameters as ``nn.Module`` does, but keep the balancing bias in fp32.

        It moves by steps of about 1e-3, which bf16 cannot add to a bias near 1.
        """
        before_E = self.expert_bias
        super()._apply(fn, recurse)
        if before_E is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before_E.to(self.expert_bias.device)
        return self


def router_sums(logits_TE: Tensor, prob_TE: Tensor, top_k_mask_TE: Tensor, *, num_sequences: int) -> RouterSums:
    """Return the sums of a routed micro-batch over each of ``num_sequences`` equal parts, and over all of it."""
    return RouterSums(
        top_k_count_BE=top_k_mask_TE.unflatten(0, (num_sequences, -1)).sum(dim=1),
        prob_sum_BE=prob_TE.unflatten(0, (num_sequences, -1)).sum(dim=1),
        z_sum=logits_TE.logsumexp(dim=-1).square().sum(),
        entropy_sum=torch.special.entr(prob_TE.detach()).sum(),
        logit_max=logits_TE.detach().max(),
    )


def updated_expert_bias(bias_E: Tensor, count_E: Tensor, rate: float) -> Tensor:
    """Return the balancing bias after one optimiser step: up by ``rate`` for experts below the mean load, else down.

    ``count_E`` are the step's top-K counts over all ranks and micro-batches; an expert at the mean stays.
    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664, algorithm 1.
    """
    load_E = count_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(load_E.mean() - load_E)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return ``x @ weight.T`` computed and kept in fp32 (fp64 if the inputs are), whatever the inputs' dtype."""
    return _WideLinear.apply(x_TD, weight_ED)


class _WideLinear(torch.autograd.Function):
    """A product in fp32 that saves its inputs in their own dtype: plain autograd would keep an fp32 copy of x_TD."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return wide_product(x_TD, weight_ED.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dlogits_TE,) = grads
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        if multiplies_as_is(x_TD, weight_ED):
            from moe_kernels.triton.router import split_bf16  # noqa: PLC0415 - triton is not on every machine

            # Two bf16 numbers hold 16 bits of an fp32 one: 128 times finer than the bf16 that the gradients end in, and
            # the tensor cores multiply the pair many times faster than fp32.
            both_T2E = split_bf16(dlogits_TE)
            dx_TD = both_T2E @ torch.cat([weight_ED, weight_ED]) if needs_x else None
            if not needs_weight:
                return dx_TD, None
            high_ED, low_ED = wide_product(both_T2E.T, x_TD).chunk(2)
            return dx_TD, (high_ED + low_ED).to(weight_ED.dtype)
        dx_TD = (dlogits_TE @ weight_ED.to(dlogits_TE.dtype)).to(x_TD.dtype) if needs_x else None
        dweight_ED = (dlogits_TE.T @ x_TD.to(dlogits_TE.dtype)).to(weight_ED.dtype) if needs_weight else None
        return dx_TD, dweight_ED


def _mass(affinity_TE: Tensor) -> Tensor:
    # Sigmoids can all underflow to 0; 1e-20 changes no sum that a softmax can give.
    # Source: transformers 5, models/deepseek_v3/modeling_deepseek_v3.py.
    return affinity_TE.sum(dim=-1, keepdim=True) + 1e-20
