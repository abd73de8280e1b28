"""Routing on a GPU as a model calls it: the CPU's plans, fp64's choices, no host sync, graphs and compilation."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from benchmarks.timing import launches_of
from model.config import MoEConfig, RouterKind, RoutingConfig
from model.router import Router, router_logits
from moe_kernels import Rounding, RoutingKind, check_plan, route_token_rounding, route_top_k
from moe_kernels.routing.token_rounding import token_rounding_torch
from moe_kernels.testing import assert_as_good_as, random_probs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FIELDS = ("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R")
TOP_K = {"routing": RoutingKind.top_k, "seed": None}


def assert_same_routing(actual, expected):
    assert torch.equal(actual.top_k_mask_TE.cpu(), expected.top_k_mask_TE.cpu())
    assert torch.equal(actual.keep_TE.cpu(), expected.keep_TE.cpu())
    for name in FIELDS:
        assert torch.equal(getattr(actual.plan, name).cpu(), getattr(expected.plan, name).cpu()), name


def random_problem(index):
    """Return (prob_TE, K, tile_m, bias_E, seed) of one of four shapes: ties in every third, a bias in every fourth."""
    T, E, K = [(700, 24, 3), (500, 60, 8), (97, 5, 5), (64, 24, 1)][index % 4]
    generator = torch.Generator().manual_seed(index)
    prob_TE = random_probs(T, E, seed=index, skew=float(index % 5))
    if index % 3 == 0:
        prob_TE = (prob_TE * 32).round() / 32
    bias_E = 0.1 * torch.randn(E, generator=generator) if index % 4 == 3 else None
    return prob_TE, K, [128, 16, 7, 64, 1][index % 5], bias_E, index * 0x123456789AB - 2**60


def test_a_thousand_random_problems_have_the_cpus_plans():
    rules = list(Rounding)
    for index in range(1000):
        prob_TE, K, tile_m, bias_E, seed = random_problem(index)
        options = {"tile_m": tile_m, "rounding": rules[index % 6], "seed": seed}
        on_gpu = None if bias_E is None else bias_E.cuda()
        actual = route_token_rounding(prob_TE.cuda(), K, bias_E=on_gpu, **options)
        check_plan(actual.plan, actual.keep_TE)
        assert_same_routing(actual, route_token_rounding(prob_TE, K, bias_E=bias_E, **options))
        if index % 5 == 0:
            actual = route_top_k(prob_TE.cuda(), K)
            check_plan(actual.plan, actual.keep_TE)
            assert_same_routing(actual, route_top_k(prob_TE, K))


# Columns held in registers, and read anew; one group of 128 experts, and eight; the last tile full, and not.
@pytest.mark.parametrize(("T", "E", "K"), [(32768, 128, 8), (50_000, 64, 8), (40_960, 96, 8), (5000, 1024, 32)])
def test_training_sizes_have_the_torch_plans(T, E, K):
    prob_TE = random_probs(T, E, seed=9).cuda()
    for rounding in Rounding:
        options = {"tile_m": 128, "rounding": rounding, "seed": 3}
        expected = token_rounding_torch(prob_TE, K, bias_E=None, **options)
        for _ in range(2):
            assert_same_routing(route_token_rounding(prob_TE, K, **options), expected)
    check_plan(expected.plan, expected.keep_TE)


@pytest.mark.parametrize("levels", [1, 40])
def test_many_equal_probabilities_have_the_torch_plans(levels):
    prob_TE = (random_probs(20_000, 32, seed=3) * levels).round().cuda() / levels
    for rounding in Rounding:
        options = {"tile_m": 128, "rounding": rounding, "seed": 3}
        expected = token_rounding_torch(prob_TE, 4, bias_E=None, **options)
        assert_same_routing(route_token_rounding(prob_TE, 4, **options), expected)


def test_the_way_to_a_plan_takes_few_launches():
    router, x_TD = make_router(), tokens()
    for routing, most in ((RoutingKind.top_k, 5), (RoutingKind.token_rounding, 7)):

        def step(routing=routing):
            with torch.no_grad():
                return router(x_TD, routing=routing, seed=None, num_sequences=4)

        step()
        launches = launches_of(step)
        assert 0 < len(launches) <= most, launches


def make_router(**changes):
    options = {"num_experts": 64, "experts_per_token": 8, "expert_width": 4, "routing": RoutingConfig(tile_m=128)}
    router = Router(MoEConfig(**{**options, **changes}), width=512).cuda().bfloat16()
    with torch.no_grad():
        router.weight.copy_(torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 512**-0.5)
    return router


def tokens(T=4096, seed=1):
    return torch.randn(T, 512, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()


def test_bf16_products_keep_fp32_and_choose_as_fp64_where_it_matters():
    router, x_TD = make_router(), tokens()
    routed = router(x_TD, **TOP_K)
    assert routed.logits_TE.dtype is torch.float32
    wide_TD, wide_ED = x_TD.double(), router.weight.detach().double()
    exact_TE = wide_TD @ wide_ED.T
    # Each of the 512 terms is rounded at most 512 times in fp32; one rounding to bf16 would cost 2^-9 of the logit.
    bound_TE = 512 * 2**-24 * (wide_TD.abs() @ wide_ED.abs().T)
    assert ((routed.logits_TE - exact_TE).abs() <= bound_TE).all()
    assert (routed.logits_TE - exact_TE).abs().max() < 2**-9 * exact_TE.abs().max() / 16
    best_TK = exact_TE.topk(9, dim=-1).values
    # exp and the division of softmax are good to a few units in the last place: what logits apart by 2^-20 move.
    clear_T = best_TK[:, 7] - best_TK[:, 8] > 2 * bound_TE.amax(-1) + 2**-20
    assert clear_T.float().mean() > 0.9
    expected_TE = torch.zeros_like(exact_TE, dtype=torch.bool).scatter_(1, exact_TE.topk(8).indices, True)
    assert torch.equal(routed.routing.top_k_mask_TE[clear_T], expected_TE[clear_T])


def test_gradients_of_the_product_are_as_good_as_in_fp32():
    x_TD, weight_ED = tokens().requires_grad_(), make_router().weight
    dlogits_TE = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2)).cuda()
    grads = torch.autograd.grad(router_logits(x_TD, weight_ED), (x_TD, weight_ED), dlogits_TE)
    baseline = dlogits_TE @ weight_ED.float(), dlogits_TE.T @ x_TD.float()
    truth = dlogits_TE.double() @ weight_ED.double(), dlogits_TE.double().T @ x_TD.double()
    for grad, fp32, exact in zip(grads, baseline, truth, strict=True):
        assert grad.dtype is torch.bfloat16
        assert_as_good_as(grad, fp32.bfloat16(), exact.detach(), factor=1.0)


@pytest.mark.parametrize("kind", RouterKind)
@pytest.mark.parametrize("routing", [RoutingKind.top_k, RoutingKind.token_rounding])
def test_nothing_waits_for_the_host(kind, routing):
    router = make_router(router=kind, routing=RoutingConfig(tile_m=128, rounding=Rounding.balanced))
    x_TD = tokens().requires_grad_()

    def step():
        routed = router(x_TD, routing=routing, seed=None, num_sequences=4)
        loss = (routed.score_TE * routed.routing.keep_TE).square().sum() + routed.sums.prob_sum_BE.square().sum()
        return torch.autograd.grad(loss + routed.sums.z_sum, (x_TD, router.weight))

    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_captured_graph_routes_new_tokens_with_a_new_seed():
    router = make_router(routing=RoutingConfig(tile_m=128, rounding=Rounding.stochastic))
    x_TD, seed = tokens(), torch.tensor(5, device="cuda")

    def route():
        return router(x_TD, routing=RoutingKind.token_rounding, seed=seed)

    side = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            route()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = route()
        x_TD.copy_(tokens(seed=7))
        seed.fill_(-(2**40) + 11)
        graph.replay()
        expected = route()
    assert_same_routing(captured.routing, expected.routing)
    assert torch.equal(captured.score_TE, expected.score_TE)
    check_plan(captured.routing.plan, captured.routing.keep_TE)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_whole_router_compiles_without_a_break(compiler):
    router = make_router(routing=RoutingConfig(tile_m=128, rounding=Rounding.nearest))
    x_TD = tokens().requires_grad_()

    def loss(x_TD):
        routed = router(x_TD, routing=RoutingKind.token_rounding, seed=None, num_sequences=2)
        kept_TE = routed.score_TE * routed.routing.keep_TE
        return kept_TE.square().sum() + 1e-3 * routed.sums.z_sum, routed.routing.keep_TE

    value, keep_TE = loss(x_TD)
    compiled_value, compiled_keep_TE = torch.compile(loss, fullgraph=True, backend=compiler)(x_TD)
    assert torch.equal(compiled_keep_TE, keep_TE)
    expected, actual = (torch.autograd.grad(v, x_TD)[0].float() for v in (value, compiled_value))
    assert (actual - expected).norm() <= 2**-8 * expected.norm()  # bf16 gradients
    assert expected.norm() > 0
