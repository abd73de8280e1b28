"""Token rounding: the claims of docs/token_rounding.md, each by itself."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moe_kernels import Rounding, RoutingKind, check_plan, route_token_rounding, row_capacity
from moe_kernels.testing import probs_with_counts, random_probs

RULES = list(Rounding)


def route(prob_TE, K, tile_m, rounding, **options):
    return route_token_rounding(prob_TE, K, tile_m=tile_m, rounding=rounding, **{"seed": 0, **options})


def counts(routing):
    return routing.plan.expert_offsets_E1.diff().tolist()


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize(("T", "E", "K", "tile_m"), [(128, 8, 2, 16), (101, 7, 3, 8), (300, 16, 4, 32), (64, 4, 4, 5)])
def test_rounded_counts_are_tile_multiples(rounding, T, E, K, tile_m):
    for seed in range(5):
        routing = route(random_probs(T, E, seed=seed), K, tile_m, rounding)
        check_plan(routing.plan, routing.keep_TE)
        count_E, top_k_E = routing.keep_TE.sum(0), routing.top_k_mask_TE.sum(0)
        assert (routing.top_k_mask_TE.sum(1) == K).all()
        assert (count_E % tile_m == 0).all()
        assert (count_E - top_k_E).abs().max() < tile_m
        assert count_E.sum() > 0
        if rounding is Rounding.nearest:
            free_E = top_k_E + tile_m <= T  # nothing to clamp
            assert ((count_E - top_k_E)[free_E].abs() <= tile_m / 2).all()


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [(Rounding.nearest, [0, 8, 8, 8]), (Rounding.up, [8, 8, 8, 16]), (Rounding.down, [0, 0, 8, 8])],
)
def test_half_a_tile_goes_down(rounding, expected):
    prob_TE = probs_with_counts([4, 5, 8, 12], seed=0)
    assert counts(route(prob_TE, 1, 8, rounding)) == expected


def test_balanced_carries_the_deviation():
    # z: 3 goes down, -3; 3 goes up, +2; 4 goes down, for |2 - 4| < |2 + 4|, -2; 6 goes up, 0.
    prob_TE = probs_with_counts([3, 3, 4, 6], seed=0)
    assert counts(route(prob_TE, 1, 8, Rounding.balanced)) == [0, 8, 0, 8]


@pytest.mark.parametrize("tile_m", [4, 7, 16])
def test_balanced_keeps_the_total_within_half_a_tile(tile_m):
    for seed in range(30):
        T, E, K = 16 * tile_m, 9, 2  # T is a multiple of the tile, so nothing is clamped
        routing = route(random_probs(T, E, seed=seed), K, tile_m, Rounding.balanced)
        assert abs(int(routing.keep_TE.sum()) - T * K) <= tile_m / 2


def test_balanced_pays_a_clamped_tile_at_the_next_expert_that_may_go_up():
    prob_TE = torch.zeros(90, 3)
    prob_TE[:, 0] = 0.9  # chosen by all 90
    prob_TE[:34, 1] = 0.1  # chosen by 34
    prob_TE[34:, 2] = 0.1  # chosen by 56
    # z: 90 wants 96 but 90 tokens fill only 64, -26; 34 goes up, for |64 - 34 - 26| < |32 - 34 - 26|, +4; 56 goes up.
    assert counts(route(prob_TE, 2, 32, Rounding.balanced)) == [64, 64, 64]
    assert counts(route(prob_TE, 2, 32, Rounding.nearest)) == [64, 32, 64]


def test_targets_stop_at_what_the_tokens_can_fill():
    prob_TE = probs_with_counts([0, 70, 0], seed=0)
    assert counts(route(prob_TE, 1, 32, Rounding.up)) == [0, 64, 0]


@pytest.mark.parametrize("rounding", RULES)
def test_fewer_tokens_than_a_tile_keep_nothing(rounding):
    routing = route(random_probs(7, 4, seed=0), 2, 8, rounding)
    check_plan(routing.plan, torch.zeros(7, 4, dtype=torch.bool))
    assert routing.top_k_mask_TE.sum() == 14


def test_drops_take_the_least_probable_and_ties_keep_the_lower_token():
    prob_TE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3]])  # all choose expert 0
    routing = route(prob_TE, 1, 4, Rounding.down)
    assert routing.keep_TE[:, 0].tolist() == [True, True, True, False, True]


def test_pads_take_the_most_probable_and_ties_the_lower_token():
    prob_TE = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3], [0.3, 0.7], [0.6, 0.4], [1, 0]])
    routing = route(prob_TE, 1, 4, Rounding.up)  # expert 1 is chosen by tokens 3 and 5
    assert routing.keep_TE[:, 1].nonzero().flatten().tolist() == [0, 2, 3, 5]


def test_every_top_k_pair_outranks_every_other_pair():
    # Token 3 chose expert 1 at 0.35, below the 0.45 at which tokens 0 to 2 did not choose it; one pad is due.
    prob_TE = torch.tensor([[0.55, 0.45, 0.0], [0.55, 0.45, 0.0], [0.55, 0.45, 0.0], [0.33, 0.35, 0.32]])
    routing = route(prob_TE, 1, 2, Rounding.up)
    assert routing.keep_TE[:, 1].tolist() == [True, False, False, True]


def test_the_bias_moves_the_choice_and_not_the_ranking():
    prob_TE = torch.tensor([[0.5, 0.4], [0.6, 0.1], [0.7, 0.2], [0.8, 0.3]])
    bias_E = torch.tensor([0.0, 0.3])  # moves token 0 alone to expert 1
    routing = route(prob_TE, 1, 2, Rounding.up, bias_E=bias_E)
    assert routing.top_k_mask_TE[:, 1].tolist() == [True, False, False, False]
    assert routing.keep_TE[:, 1].tolist() == [True, False, False, True]  # the pad is the next p, 0.3


def test_nearest_score_compares_summed_probabilities():
    # Expert 0 holds 3 of a tile of 4. Nearest by count goes up; the pad at 0.4 weighs less than 0.6 + 0.6 + 0.6, so up.
    prob_TE = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.6, 0.4], [0.4, 0.6], [0.4, 0.6]])
    assert counts(route(prob_TE, 1, 4, Rounding.nearest_score))[0] == 4
    # Expert 1 holds 2 of 4: by count a tie, which goes down; two pads at 0.4 weigh less than two pairs at 0.6, so up.
    assert counts(route(prob_TE, 1, 4, Rounding.nearest_score))[1] == 4
    assert counts(route(prob_TE, 1, 4, Rounding.nearest))[1] == 0


def test_stochastic_goes_up_as_often_as_its_fraction_of_the_tile():
    prob_TE = probs_with_counts([2, 16, 9, 13], seed=0)
    num_seeds, tile_m = 2000, 16
    ups_E = sum(
        (route(prob_TE, 1, tile_m, Rounding.stochastic, seed=seed).keep_TE.sum(0) > torch.tensor([0, 16, 0, 0])).long()
        for seed in range(num_seeds)
    )
    for ups, count in zip(ups_E.tolist(), [2, 16, 9, 13], strict=True):
        chance = count % tile_m / tile_m
        # Five standard deviations of a binomial: a right rule fails once in two million.
        assert abs(ups / num_seeds - chance) <= 5 * (chance * (1 - chance) / num_seeds) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 5, 2**63 - 1])
def test_stochastic_is_a_function_of_the_seed_as_int_or_tensor(seed):
    prob_TE = random_probs(256, 16, seed=0)
    routing = route(prob_TE, 2, 16, Rounding.stochastic, seed=seed)
    again = route(prob_TE, 2, 16, Rounding.stochastic, seed=torch.tensor(seed))
    other = route(prob_TE, 2, 16, Rounding.stochastic, seed=seed ^ (1 << 45))
    assert torch.equal(routing.keep_TE, again.keep_TE)
    assert not torch.equal(routing.keep_TE, other.keep_TE)


def test_the_row_capacity_of_rounding_up_is_reached():
    prob_TE = probs_with_counts([1, 9, 17, 5], seed=0)  # all but the last one above a multiple of 8
    routing = route(prob_TE, 1, 8, Rounding.up)
    assert int(routing.plan.expert_offsets_E1[-1]) == 32 + 7 + 7 + 7 + 3
    assert routing.plan.R == 32 + 4 * 7
    for rounding, R in [(Rounding.nearest, 32 + 4 * 3), (Rounding.balanced, 36), (Rounding.down, 32)]:
        assert row_capacity(RoutingKind.token_rounding, T=32, E=4, K=1, tile_m=8, rounding=rounding) == R


@pytest.mark.parametrize("rounding", RULES)
def test_no_value_is_needed_on_the_host(rounding):
    with FakeTensorMode():  # its tensors have no values: reading one raises
        prob_TE = torch.empty(64, 8).softmax(-1)
        plan = route(prob_TE, 2, 8, rounding, bias_E=torch.empty(8)).plan
    assert plan.token_R.shape == (plan.R,)


def test_the_choice_has_no_gradient():
    prob_TE = random_probs(32, 4, seed=0).requires_grad_()
    routing = route(prob_TE, 2, 8, Rounding.nearest_score, bias_E=torch.zeros(4, requires_grad=True))
    tensors = [*vars(routing.plan).values(), routing.keep_TE, routing.top_k_mask_TE]
    assert not any(tensor.requires_grad for tensor in tensors if isinstance(tensor, torch.Tensor))


def test_nan_probabilities_still_give_a_valid_plan():
    prob_TE = random_probs(40, 6, seed=0)
    prob_TE[3:5] = float("nan")
    prob_TE[7, 2] = float("nan")
    for rounding in RULES:
        routing = route(prob_TE, 2, 8, rounding)
        check_plan(routing.plan, routing.keep_TE)
        assert (routing.keep_TE.sum(0) % 8 == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": 0}, "experts_per_token"),
        ({"K": 5}, "experts_per_token"),
        ({"tile_m": 0}, "tile_m"),
        ({"bias_E": torch.zeros(3)}, "bias_E"),
        ({"rounding": Rounding.stochastic, "seed": None}, "seed"),
        ({"rounding": Rounding.stochastic, "seed": 2**63}, "64-bit"),
        ({"prob_TE": torch.zeros(4)}, "shape"),
        ({"prob_TE": torch.zeros(4, 4, dtype=torch.long)}, "floating"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    arguments = {"prob_TE": random_probs(8, 4, seed=0), "K": 2, "tile_m": 4, "rounding": Rounding.nearest, **options}
    with pytest.raises(ValueError, match=message):
        route_token_rounding(**arguments)


def test_the_example_in_the_docs_is_what_is_computed():
    prob_TE = torch.tensor(
        [
            [0.70, 0.20, 0.10],
            [0.60, 0.30, 0.10],
            [0.55, 0.05, 0.40],
            [0.80, 0.15, 0.05],
            [0.50, 0.45, 0.05],
            [0.20, 0.75, 0.05],
            [0.05, 0.65, 0.30],
            [0.10, 0.60, 0.30],
        ]
    )
    expected = {
        Rounding.nearest: [4, 4, 0],
        Rounding.nearest_score: [8, 4, 0],
        Rounding.balanced: [4, 4, 0],
        Rounding.up: [8, 4, 0],
        Rounding.down: [4, 0, 0],
    }
    assert {rule: counts(route(prob_TE, 1, 4, rule)) for rule in expected} == expected
    plan = route(prob_TE, 1, 4, Rounding.nearest).plan
    assert plan.token_R[:8].tolist() == list(range(8))
    assert plan.expert_R[:8].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert plan.token_offsets_T1.tolist() == list(range(9))
    assert (route(prob_TE, 1, 4, Rounding.down).keep_TE.sum(1) == 0).nonzero().flatten().tolist() == [4, 5, 6, 7]
