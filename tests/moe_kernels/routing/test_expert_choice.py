"""Expert choice: every expert takes the same number of tokens."""

import torch

from moe_kernels import check_plan, route_expert_choice
from moe_kernels.testing import random_probs


def test_every_expert_takes_its_share_of_its_best_tokens():
    prob_TE = random_probs(50, 6, seed=0)
    routing = route_expert_choice(prob_TE, 2)
    check_plan(routing.plan, routing.keep_TE)
    assert routing.keep_TE.sum(0).tolist() == [50 * 2 // 6] * 6
    for expert in range(6):
        kept = routing.keep_TE[:, expert]
        assert prob_TE[kept, expert].min() > prob_TE[~kept, expert].max()
    assert (routing.top_k_mask_TE.sum(1) == 2).all()


def test_ties_go_to_the_lower_token():
    keep_TE = route_expert_choice(torch.full((8, 4), 0.25), 1).keep_TE
    assert keep_TE[:2].all()
    assert not keep_TE[2:].any()


def test_fewer_pairs_than_experts_keep_nothing():
    routing = route_expert_choice(random_probs(1, 4, seed=0), 2)
    check_plan(routing.plan, torch.zeros(1, 4, dtype=torch.bool))
    assert routing.plan.R == 0
