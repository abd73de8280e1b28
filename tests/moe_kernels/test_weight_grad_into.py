"""Weight gradients that are added to an fp32 tensor: the sum over many micro-batches, on the CPU's backends."""

import pytest
import torch

from moe_kernels.portable.ops import PortableBackend
from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.routing.kinds import Rounding
from moe_kernels.routing.token_rounding import route_token_rounding
from moe_kernels.side import GatheredSide
from moe_kernels.testing import random_probs

BACKENDS = [ReferenceBackend(), PortableBackend()]
MICRO_BATCHES = 16


def micro_batches(gathered, dtype):
    """Return (left, right, plan) for each micro-batch. Rows of no expert hold NaN; expert 2 never has a row."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(MICRO_BATCHES):
        prob_TE = random_probs(90, 5, seed=i)
        prob_TE[:, 2] = 0.0
        plan = route_token_rounding(prob_TE, 2, tile_m=16, rounding=Rounding.nearest).plan
        tokens = torch.randn(plan.T, 24, generator=generator).to(dtype)
        rows = torch.randn(plan.R, 40, generator=generator).to(dtype)
        rows[plan.expert_offsets_E1[-1] :] = float("nan")
        sides = (tokens, rows) if gathered is GatheredSide.left else (rows, tokens)
        assert plan.expert_offsets_E1[2] == plan.expert_offsets_E1[3]
        batches.append((*sides, plan))
    return batches


@pytest.mark.parametrize("gathered", GatheredSide)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_sums_over_micro_batches_lose_less_than_bf16_gradients_summed_in_fp32(backend, gathered):
    batches = micro_batches(gathered, torch.bfloat16)
    shape = backend.weight_grad(*batches[0], gathered=gathered).shape
    before = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    into, rounded, truth = before.clone(), before.clone(), before.double()
    for left, right, plan in batches:
        assert backend.weight_grad(left, right, plan, gathered=gathered, into=into) is into
        rounded += backend.weight_grad(left, right, plan, gathered=gathered)
        ReferenceBackend().weight_grad(left.double(), right.double(), plan, gathered=gathered, into=truth)
    error, rounded_error = ((total - truth).abs().max().item() for total in (into, rounded))
    largest = truth.abs().max().item()
    assert error <= 2 * MICRO_BATCHES * torch.finfo(torch.float32).eps * largest
    assert error < rounded_error / 100
    assert torch.equal(into[2], before[2]), "an expert without rows adds nothing"


@pytest.mark.parametrize("gathered", GatheredSide)
def test_the_twins_sum_is_the_sum_of_its_gradients(gathered):
    twin, batches = ReferenceBackend(), micro_batches(gathered, torch.float64)
    into = torch.zeros_like(twin.weight_grad(*batches[0], gathered=gathered))
    for batch in batches:
        twin.weight_grad(*batch, gathered=gathered, into=into)
    expected = sum(twin.weight_grad(*batch, gathered=gathered) for batch in batches)
    assert bool((expected[[0, 1, 3, 4]] != 0).all())
    assert torch.allclose(into, expected, rtol=1e-12, atol=1e-12)
