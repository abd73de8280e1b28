"""Token rounding without a sort: the plan of the torch rules, bit for bit, under every rule.

Few and small problems: the interpreter takes a tenth of a second for every expert. test_routing_on_gpu.py has many.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels import Rounding, RoutingKind, check_plan, route_token_rounding, row_capacity
from moe_kernels.reference.routing import route_ref
from moe_kernels.testing import random_probs
from moe_kernels.triton import rounding as kernels
from moe_kernels.triton.choice import choose


def routed(prob_TE, K, *, device, tile_m, rounding, bias_E=None, seed=None):
    """Return the kernels' routing on the CPU; ``route_token_rounding`` is what takes this path for CUDA tensors."""
    bias_E = None if bias_E is None else bias_E.to(device)
    return kernels.choose_and_round(prob_TE.to(device), K, tile_m=tile_m, rounding=rounding, bias_E=bias_E, seed=seed)


def assert_same_routing(actual, expected):
    check_plan(actual.plan, actual.keep_TE)
    assert torch.equal(actual.top_k_mask_TE.cpu(), expected.top_k_mask_TE)
    assert torch.equal(actual.keep_TE.cpu(), expected.keep_TE)
    for name in ("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R"):
        assert torch.equal(getattr(actual.plan, name).cpu(), getattr(expected.plan, name)), name
    assert actual.plan.R == expected.plan.R


@pytest.mark.parametrize("rounding", Rounding)
def test_every_rule_gives_the_torch_plan(device, rounding):
    prob_TE, seed = random_probs(29, 4, seed=3), -(2**62) + 12345
    bias_E = torch.tensor([0.1, 0.0, -0.1, 0.0])
    actual = routed(prob_TE, 2, device=device, tile_m=8, rounding=rounding, bias_E=bias_E, seed=seed)
    options = {"tile_m": 8, "rounding": rounding, "bias_E": bias_E, "seed": seed}
    assert_same_routing(actual, route_token_rounding(prob_TE, 2, **options))
    assert_same_routing(actual, route_ref(prob_TE, 2, RoutingKind.token_rounding, **options))


@pytest.mark.parametrize("rounding", [Rounding.up, Rounding.down])
def test_ties_go_to_the_lower_token(device, rounding):
    prob_TE = (random_probs(27, 3, seed=5) * 3).round() / 3
    actual = routed(prob_TE, 1, device=device, tile_m=4, rounding=rounding)
    assert_same_routing(actual, route_token_rounding(prob_TE, 1, tile_m=4, rounding=rounding))


@pytest.mark.parametrize("rounding", [Rounding.nearest, Rounding.nearest_score])
def test_columns_too_long_to_hold_give_the_same_plan(device, monkeypatch, rounding):
    monkeypatch.setattr(kernels, "_HELD_TOKENS", 16)
    monkeypatch.setattr(kernels, "_READ_TOKENS", 16)
    prob_TE = (random_probs(40, 2, seed=6) * 16).round() / 16
    actual = routed(prob_TE, 1, device=device, tile_m=6, rounding=rounding)
    assert_same_routing(actual, route_token_rounding(prob_TE, 1, tile_m=6, rounding=rounding))


@pytest.mark.parametrize("levels", [None, 8])
def test_more_keys_than_a_column_of_the_block_holds_give_the_same_plan(device, levels):
    T, tile_m = 2100, 128
    rows, _, _ = kernels.column_block(T)
    assert rows > 1
    prob_TE = random_probs(T, 2, seed=4)
    if levels is not None:
        prob_TE = (prob_TE * levels).round() / levels
    for rounding in (Rounding.up, Rounding.down):
        actual = routed(prob_TE, 1, device=device, tile_m=tile_m, rounding=rounding)
        assert_same_routing(actual, route_token_rounding(prob_TE, 1, tile_m=tile_m, rounding=rounding))


def test_counts_may_come_in_parts_of_the_tokens(device):
    prob_TE = random_probs(40, 3, seed=8)
    chosen = choose(prob_TE.to(device), None, 1, transposed=True)
    count_BE = chosen.top_k_mask_TE.unflatten(0, (4, 10)).sum(1)
    options = {"K": 1, "tile_m": 8, "rounding": Rounding.balanced, "seed": None}
    columns = (chosen.prob_ET, chosen.top_k_mask_TE, chosen.top_k_mask_ET)
    actual = kernels.round_choice(*columns, count_BE, **options)
    assert_same_routing(actual, route_token_rounding(prob_TE, 1, tile_m=8, rounding=Rounding.balanced))


def test_counts_that_tokens_cannot_fill_are_clamped(device):
    prob_TE = torch.zeros(70, 3)
    prob_TE[:, 1] = 1.0
    actual = routed(prob_TE, 1, device=device, tile_m=32, rounding=Rounding.up)
    assert actual.plan.expert_offsets_E1.diff().tolist() == [0, 64, 0]
    assert_same_routing(actual, route_token_rounding(prob_TE, 1, tile_m=32, rounding=Rounding.up))
    few = routed(prob_TE[:5], 1, device=device, tile_m=32, rounding=Rounding.up)
    assert not few.keep_TE.any()


def test_a_seed_in_a_tensor_is_the_seed(device):
    prob_TE = random_probs(24, 3, seed=8)
    options = {"device": device, "tile_m": 8, "rounding": Rounding.stochastic}
    with pytest.raises(ValueError, match="seed"):
        routed(prob_TE, 1, seed=None, **options)
    by_int = routed(prob_TE, 1, seed=77, **options)
    assert torch.equal(routed(prob_TE, 1, seed=torch.tensor(77), **options).keep_TE, by_int.keep_TE)


def test_negative_and_missing_numbers_keep_counts_within_the_rows(device):
    value_TE = torch.randn(21, 2, generator=torch.Generator().manual_seed(0))
    expected = route_token_rounding(value_TE, 1, tile_m=4, rounding=Rounding.up)
    assert_same_routing(routed(value_TE, 1, device=device, tile_m=4, rounding=Rounding.up), expected)
    value_TE[3:9] = float("nan")
    actual = routed(value_TE, 1, device=device, tile_m=4, rounding=Rounding.up)
    check_plan(actual.plan, actual.keep_TE)
    assert (actual.keep_TE.sum(0) % 4 == 0).all()


def test_the_operator_says_its_shapes_ahead(device):
    chosen = choose(random_probs(20, 2, seed=0).to(device), None, 1, transposed=True)
    R = row_capacity(RoutingKind.token_rounding, T=20, E=2, K=1, tile_m=8, rounding=Rounding.up)
    arguments = (chosen.prob_ET, chosen.top_k_mask_ET, chosen.count_E, None, 8, "up", R)
    torch.library.opcheck(torch.ops.gristmill.round_to_tiles, arguments, test_utils=("test_schema", "test_faketensor"))
