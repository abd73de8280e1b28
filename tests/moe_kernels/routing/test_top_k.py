"""Top-K: exact, with ties to the lower expert."""

import pytest
import torch

from moe_kernels import check_plan, route_top_k
from moe_kernels.routing.ranking import rank_keys
from moe_kernels.testing import random_probs


def test_ties_go_to_the_lower_expert():
    for K in (1, 2, 5):
        routing = route_top_k(torch.zeros(50, 9), K)
        assert routing.keep_TE[:, :K].all()
        assert not routing.keep_TE[:, K:].any()
    choice_TE = torch.tensor([[0.1, 0.5, 0.2, 0.5, 0.5, 0.2]])
    assert route_top_k(choice_TE, 2).keep_TE[0].nonzero().flatten().tolist() == [1, 3]
    assert route_top_k(choice_TE, 4).keep_TE[0].nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_top_k_is_torch_top_k_where_nothing_ties():
    choice_TE = random_probs(200, 16, seed=0).logit()  # negative and positive
    routing = route_top_k(choice_TE, 3)
    check_plan(routing.plan, routing.keep_TE)
    assert torch.equal(routing.keep_TE.nonzero()[:, 1].view(200, 3), choice_TE.topk(3).indices.sort().values)
    assert routing.plan.R == 600
    assert routing.keep_TE is routing.top_k_mask_TE


def test_neighbouring_floats_are_told_apart():
    one = torch.tensor(1.0)
    values = torch.stack([torch.nextafter(one, -one), one, torch.nextafter(one, 2 * one), one])
    for sign in (1, -1):
        order = rank_keys(sign * values).argsort(descending=True).tolist()
        assert order == ([2, 1, 3, 0] if sign == 1 else [0, 1, 3, 2])


def test_keys_order_every_kind_of_float():
    inf, tiny = float("inf"), 1e-45
    values = torch.tensor([-inf, -1.0, -tiny, 0.0, tiny, 1.0, 3e38, inf, float("nan")])
    keys = rank_keys(values)
    assert (keys.diff() > 0).all()
    assert (keys >= 0).all()
    zeros = rank_keys(torch.tensor([-0.0, 0.0]))
    assert zeros[0] > zeros[1]  # equal numbers: the lower index wins


@pytest.mark.parametrize("K", [0, 5, -1])
def test_k_out_of_range_is_refused(K):
    with pytest.raises(ValueError, match="experts_per_token"):
        route_top_k(torch.zeros(3, 4), K)
