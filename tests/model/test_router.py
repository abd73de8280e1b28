"""The router weighs and chooses as it says, in fp32, with gradients through the weights alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from model.config import MoEConfig, RouterKind, RoutingConfig
from model.router import Router, router_logits, updated_expert_bias
from moe_kernels import Rounding, RoutingKind

T, D, E, K = 48, 12, 6, 2
TOP_K = {"routing": RoutingKind.top_k, "seed": None}


def make_router(dtype=torch.float32, **changes) -> Router:
    config = MoEConfig(num_experts=E, experts_per_token=K, expert_width=4, routing=RoutingConfig(tile_m=8))
    router = Router(replace(config, **changes), width=D)
    with torch.no_grad():
        router.weight.copy_(0.5 * torch.randn(E, D, generator=torch.Generator().manual_seed(0)))
    return router.to(dtype)


def tokens(dtype=torch.float32):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_softmax_scores_are_the_probabilities():
    routed = make_router()(tokens(), **TOP_K)
    expected_TE = (tokens() @ make_router().weight.T).softmax(-1)
    torch.testing.assert_close(routed.score_TE, expected_TE)
    torch.testing.assert_close(routed.prob_TE, expected_TE)
    assert torch.equal(routed.routing.top_k_mask_TE.sum(-1), torch.full((T,), K))
    kept_TE = torch.zeros_like(routed.routing.keep_TE).scatter_(1, expected_TE.topk(K).indices, True)
    assert torch.equal(routed.routing.keep_TE, kept_TE)


@pytest.mark.parametrize("kind", RouterKind)
def test_normalised_weights_of_the_top_k_sum_to_the_scale(kind):
    router = make_router(router=kind, normalize_top_k=True, routed_scale=2.5)
    routed = router(tokens(), **TOP_K)
    mass_T = (routed.score_TE * routed.routing.top_k_mask_TE).sum(-1)
    torch.testing.assert_close(mass_T, torch.full((T,), 2.5))


@pytest.mark.parametrize("kind", RouterKind)
@pytest.mark.parametrize("normalize", [False, True])
def test_rounding_changes_which_pairs_are_kept_and_no_weight(kind, normalize):
    router = make_router(router=kind, normalize_top_k=normalize)
    top_k = router(tokens(), **TOP_K)
    rounded = router(tokens(), routing=RoutingKind.token_rounding, seed=None)
    assert torch.equal(rounded.score_TE, top_k.score_TE)
    assert torch.equal(rounded.prob_TE, top_k.prob_TE)
    assert torch.equal(rounded.routing.top_k_mask_TE, top_k.routing.top_k_mask_TE)
    assert not torch.equal(rounded.routing.keep_TE, top_k.routing.keep_TE)
    assert (rounded.routing.keep_TE.sum(0) % 8 == 0).all()


def test_a_pair_added_by_rounding_weighs_its_share_of_the_top_k_mass():
    router = make_router(normalize_top_k=True, routing=RoutingConfig(tile_m=8, rounding=Rounding.up))
    routed = router(tokens(), routing=RoutingKind.token_rounding, seed=None)
    added_TE = routed.routing.keep_TE & ~routed.routing.top_k_mask_TE
    assert added_TE.any()
    mass_T1 = (routed.prob_TE * routed.routing.top_k_mask_TE).sum(-1, keepdim=True)
    torch.testing.assert_close(routed.score_TE[added_TE], (routed.prob_TE / mass_T1)[added_TE])


def test_the_balancing_bias_chooses_and_does_not_weigh():
    router = make_router(router=RouterKind.sigmoid)
    plain = router(tokens(), **TOP_K)
    router.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    biased = router(tokens(), **TOP_K)
    chosen_TK = (biased.logits_TE.sigmoid() + router.expert_bias).topk(K).indices
    expected_TE = torch.zeros(T, E, dtype=torch.bool).scatter_(1, chosen_TK, True)
    assert torch.equal(biased.routing.top_k_mask_TE, expected_TE)
    assert not torch.equal(plain.routing.top_k_mask_TE, expected_TE)
    assert torch.equal(biased.score_TE, plain.score_TE)


def test_rounding_ranks_tokens_by_sigmoid_without_the_bias():
    router = make_router(router=RouterKind.sigmoid)
    router.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    top_k = router(tokens(), **TOP_K)
    rounded = router(tokens(), routing=RoutingKind.token_rounding, seed=None)
    assert torch.equal(rounded.routing.top_k_mask_TE, top_k.routing.top_k_mask_TE)
    dropped_TE = rounded.routing.top_k_mask_TE & ~rounded.routing.keep_TE
    added_TE = rounded.routing.keep_TE & ~rounded.routing.top_k_mask_TE
    assert dropped_TE.any()
    assert added_TE.any()
    affinity_TE = rounded.logits_TE.sigmoid()
    for expert in range(E):
        affinity_T, chosen_T, kept_T = (
            tensor[:, expert] for tensor in (affinity_TE, rounded.routing.top_k_mask_TE, rounded.routing.keep_TE)
        )
        if dropped_TE[:, expert].any():
            assert affinity_T[chosen_T & ~kept_T].max() <= affinity_T[chosen_T & kept_T].min()
        if added_TE[:, expert].any():
            assert affinity_T[~chosen_T & kept_T].min() >= affinity_T[~chosen_T & ~kept_T].max()


def test_the_normalising_mass_is_that_of_the_biased_choice():
    router = make_router(router=RouterKind.sigmoid, normalize_top_k=True)
    router.expert_bias[3] = 10.0
    routed = router(tokens(), **TOP_K)
    affinity_TE = routed.logits_TE.sigmoid()
    mass_T1 = (affinity_TE * routed.routing.top_k_mask_TE).sum(-1, keepdim=True)
    torch.testing.assert_close(routed.score_TE, affinity_TE / mass_T1)


def test_sigmoid_probabilities_sum_to_one_for_the_losses():
    routed = make_router(router=RouterKind.sigmoid)(tokens(), **TOP_K)
    torch.testing.assert_close(routed.prob_TE.sum(-1), torch.ones(T))
    torch.testing.assert_close(routed.score_TE, routed.logits_TE.sigmoid())


def test_sigmoids_that_underflow_give_zeros_and_no_nan():
    router = make_router(router=RouterKind.sigmoid, normalize_top_k=True)
    with torch.no_grad():
        router.weight.fill_(-1.0)
    x_TD = torch.full((T, D), 100.0, requires_grad=True)
    routed = router(x_TD, **TOP_K)
    assert (routed.score_TE == 0).all()
    (routed.score_TE.sum() + routed.prob_TE.sum()).backward()
    assert x_TD.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_fp32_product_of_the_rounded_inputs(dtype):
    router, x_TD = make_router(dtype), tokens(dtype)
    routed = router(x_TD, **TOP_K)
    for tensor in (routed.logits_TE, routed.score_TE, routed.prob_TE):
        assert tensor.dtype == torch.float32
    wide_TD, wide_ED = x_TD.double(), router.weight.double()
    # Each of the 12 terms is rounded at most 12 times in fp32, by 2^-24; one rounding to bf16 would cost 2^-8.
    bound_TE = D * 2**-24 * (wide_TD.abs() @ wide_ED.abs().T)
    assert ((routed.logits_TE - wide_TD @ wide_ED.T).abs() <= bound_TE).all()


def test_the_product_saves_its_inputs_in_their_own_dtype():
    x_TD, weight_ED = tokens(torch.bfloat16).requires_grad_(), make_router(torch.bfloat16).weight
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        logits_TE = router_logits(x_TD, weight_ED)
    assert [tensor.dtype for tensor in saved] == [torch.bfloat16, torch.bfloat16]
    grads = torch.autograd.grad(logits_TE.square().sum(), (x_TD, weight_ED))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]
    wide = [tensor.detach().float().requires_grad_() for tensor in (x_TD, weight_ED)]
    expected = torch.autograd.grad((wide[0] @ wide[1].T).square().sum(), wide)
    for grad, truth in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, truth.bfloat16())


@pytest.mark.parametrize("kind", RouterKind)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("routing", RoutingKind)
def test_router_passes_gradcheck(kind, normalize, routing):
    router = make_router(torch.float64, router=kind, normalize_top_k=normalize, routed_scale=1.7)

    def kept_scores(x_TD, weight_ED):
        routed = torch.func.functional_call(router, {"weight": weight_ED}, (x_TD,), {"routing": routing, "seed": None})
        z_T = routed.logits_TE.logsumexp(-1).square()
        return routed.score_TE * routed.routing.keep_TE, routed.prob_TE.sum(0), z_T

    inputs = (tokens(torch.float64)[:10].requires_grad_(), router.weight.detach().clone().requires_grad_())
    assert torch.autograd.gradcheck(kept_scores, inputs)


def test_stochastic_rounding_is_a_function_of_its_seed():
    router = make_router(routing=RoutingConfig(tile_m=16, rounding=Rounding.stochastic))
    masks = [
        router(tokens(), routing=RoutingKind.token_rounding, seed=seed).routing.keep_TE for seed in (0, 0, *range(1, 9))
    ]
    assert torch.equal(masks[0], masks[1])
    assert any(not torch.equal(masks[0], mask) for mask in masks[2:])
    with pytest.raises(ValueError, match="seed"):
        router(tokens(), routing=RoutingKind.token_rounding, seed=None)


def test_one_expert_with_normalisation_is_refused():
    with pytest.raises(ValueError, match="normalize_top_k"):
        MoEConfig(num_experts=E, experts_per_token=1, expert_width=4, normalize_top_k=True)


@pytest.mark.parametrize(
    "cast", [lambda module: module.to(torch.bfloat16), nn.Module.bfloat16, nn.Module.half, nn.Module.double]
)
def test_the_balancing_bias_stays_in_fp32_with_all_its_bits(cast):
    router = make_router(router=RouterKind.sigmoid)
    bias_E = 1 + torch.rand(E, generator=torch.Generator().manual_seed(0)) / 1000
    router.expert_bias.copy_(bias_E)
    model = cast(nn.Sequential(router))
    assert model[0].weight.dtype != torch.float32
    assert model[0].expert_bias.dtype == torch.float32
    assert torch.equal(model[0].expert_bias, bias_E)
    assert torch.equal(model.state_dict()["0.expert_bias"], bias_E)


def test_the_balancing_bias_moves_to_other_devices():
    router = make_router(router=RouterKind.sigmoid).to(device="meta", dtype=torch.bfloat16)
    assert router.expert_bias.is_meta
    assert router.expert_bias.dtype == torch.float32
    assert not router.to_empty(device="cpu").expert_bias.is_meta


def test_the_softmax_router_has_no_balancing_bias():
    router = make_router()
    assert router.expert_bias is None
    assert set(router.state_dict()) == {"weight"}


def test_the_balancing_bias_steps_against_the_load():
    bias_E = torch.tensor([0.5, 0.0, -0.25, 0.0])
    updated_E = updated_expert_bias(bias_E, torch.tensor([10, 0, 4, 6]), 0.125)
    assert torch.equal(updated_E, torch.tensor([0.375, 0.125, -0.125, -0.125]))
    assert torch.equal(updated_expert_bias(bias_E, torch.tensor([5, 5, 5, 5]), 0.125), bias_E)
    assert torch.equal(bias_E, torch.tensor([0.5, 0.0, -0.25, 0.0]))


def test_the_balancing_bias_spreads_a_collapsed_load():
    router = make_router(router=RouterKind.sigmoid)
    with torch.no_grad():
        router.weight[:] = router.weight[0] + 0.01 * router.weight
    x_TD = tokens() + 1.0
    first_E = router(x_TD, **TOP_K).routing.top_k_mask_TE.sum(0)
    count_E = first_E
    for _ in range(60):
        router.expert_bias.copy_(updated_expert_bias(router.expert_bias, count_E, 0.002))
        count_E = router(x_TD, **TOP_K).routing.top_k_mask_TE.sum(0)
    assert count_E.max() < 0.7 * first_E.max()
