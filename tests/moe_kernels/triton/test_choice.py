"""The choice is exact: fp32 values as they are, ties to the lower expert."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels.routing.top_k import top_k_mask
from moe_kernels.testing import random_probs
from moe_kernels.triton.choice import choose


@pytest.mark.parametrize(("T", "E", "K"), [(1, 1, 1), (45, 7, 3), (20, 64, 64), (33, 130, 8), (6, 1024, 32)])
@pytest.mark.parametrize("levels", [None, 3])
def test_the_choice_is_the_sorted_ones(device, T, E, K, levels):
    value_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    if levels is not None:
        value_TE = (value_TE * levels).round() / levels  # negative zeros too
    chosen = choose(value_TE.to(device), None, K, transposed=True)
    expected_TE = top_k_mask(value_TE, K)
    assert torch.equal(chosen.top_k_mask_TE.cpu(), expected_TE)
    assert torch.equal(chosen.top_k_mask_ET.cpu(), expected_TE.t())
    assert torch.equal(chosen.prob_ET.cpu(), value_TE.t())
    assert chosen.count_E.tolist() == expected_TE.sum(0).tolist()


def test_values_one_rounding_apart_are_told_apart(device):
    one = torch.tensor(1.0)
    above = torch.nextafter(one, 2 * one)
    value_TE = torch.stack([one, one, above, one]).repeat(3, 1)
    chosen_TE = choose(value_TE.to(device), None, 2, transposed=False).top_k_mask_TE
    assert chosen_TE.tolist() == [[True, False, True, False]] * 3


def test_signed_zeros_tie_and_extremes_order(device):
    infinity = float("inf")
    value_TE = torch.tensor([[-0.0, 0.0, -1.0, -0.0], [-infinity, -3e38, infinity, 3e38], [-infinity] * 4])
    chosen_TE = choose(value_TE.to(device), None, 2, transposed=False).top_k_mask_TE
    assert torch.equal(chosen_TE.cpu(), top_k_mask(value_TE, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_compared_in_fp32(device, dtype):
    value_TE = torch.randn(30, 9, dtype=dtype, generator=torch.Generator().manual_seed(0))
    chosen_TE = choose(value_TE.to(device), None, 4, transposed=False).top_k_mask_TE
    assert torch.equal(chosen_TE.cpu(), top_k_mask(value_TE, 4))


def test_the_bias_moves_the_choice_and_no_probability(device):
    prob_TE, bias_E = random_probs(40, 6, seed=1), torch.linspace(-0.3, 0.3, 6)
    chosen = choose(prob_TE.to(device), bias_E.to(device), 2, transposed=True)
    assert torch.equal(chosen.top_k_mask_TE.cpu(), top_k_mask(prob_TE + bias_E, 2))
    assert not torch.equal(chosen.top_k_mask_TE.cpu(), top_k_mask(prob_TE, 2))
    assert torch.equal(chosen.prob_ET.cpu(), prob_TE.t())


def test_numbers_that_are_none_still_choose_k_experts(device):
    value_TE = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    value_TE[::2] = float("nan")
    chosen_TE = choose(value_TE.to(device), None, 3, transposed=False).top_k_mask_TE
    assert (chosen_TE.sum(1) == 3).all()
