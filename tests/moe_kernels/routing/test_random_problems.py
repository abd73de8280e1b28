"""Random problems: every routing agrees with a loop over Python numbers, exactly, and its plan holds its invariants."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import Rounding, RoutingKind, check_plan, route_expert_choice, route_token_rounding, route_top_k
from moe_kernels.reference.routing import plan_ref, route_ref
from moe_kernels.routing.build import plan_from_mask
from moe_kernels.routing.plan import Routing


@st.composite
def problems(draw):
    """Draw (prob_TE, K, bias_E): few distinct values often, so that ties are common."""
    T, E = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    K = draw(st.integers(1, E))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits_TE = torch.randn(T, E, generator=generator) + draw(st.sampled_from([0.0, 2.0, 8.0])) * torch.randn(
        E, generator=generator
    )
    levels = draw(st.sampled_from([1, 2, 4, None]))
    prob_TE = logits_TE.softmax(-1) if levels is None else (logits_TE.sigmoid() * levels).round() / levels
    bias_E = draw(st.sampled_from([None, 0.5]))
    return prob_TE, K, None if bias_E is None else bias_E * torch.randn(E, generator=generator)


def assert_same_routing(actual: Routing, expected: Routing) -> None:
    check_plan(actual.plan, actual.keep_TE)
    assert torch.equal(actual.top_k_mask_TE, expected.top_k_mask_TE)
    assert torch.equal(actual.keep_TE, expected.keep_TE)
    for name in ("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R"):
        assert torch.equal(getattr(actual.plan, name), getattr(expected.plan, name)), name
    assert (actual.plan.T, actual.plan.E, actual.plan.R) == (expected.plan.T, expected.plan.E, expected.plan.R)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    problems(),
    st.integers(1, 9),
    st.sampled_from(Rounding),
    st.integers(-(2**63), 2**63 - 1),
)
def test_token_rounding_agrees_with_the_loop(problem, tile_m, rounding, seed):
    prob_TE, K, bias_E = problem
    actual = route_token_rounding(prob_TE, K, tile_m=tile_m, rounding=rounding, bias_E=bias_E, seed=seed)
    kind = RoutingKind.token_rounding
    expected = route_ref(prob_TE, K, kind, tile_m=tile_m, rounding=rounding, bias_E=bias_E, seed=seed)
    assert_same_routing(actual, expected)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_top_k_agrees_with_the_loop(problem):
    prob_TE, K, bias_E = problem
    choice_TE = prob_TE if bias_E is None else prob_TE + bias_E
    assert_same_routing(route_top_k(choice_TE, K), route_ref(prob_TE, K, RoutingKind.top_k, bias_E=bias_E))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems())
def test_expert_choice_agrees_with_the_loop(problem):
    prob_TE, K, _ = problem
    assert_same_routing(route_expert_choice(prob_TE, K), route_ref(prob_TE, K, RoutingKind.expert_choice))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 9), st.floats(0, 1), st.integers(0, 2**32))
def test_plan_of_any_mask_agrees_with_the_loop(T, E, spare_rows, density, seed):
    keep_TE = torch.rand(T, E, generator=torch.Generator().manual_seed(seed)) < density
    R = int(keep_TE.sum()) + spare_rows
    plan, expected = plan_from_mask(keep_TE, R=R), plan_ref(keep_TE, R=R)
    assert_same_routing(Routing(plan, keep_TE, keep_TE), Routing(expected, keep_TE, keep_TE))
