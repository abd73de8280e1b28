"""Scores reach their rows and gradients their pairs, each once, whatever lies in unused rows."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels import scores as in_torch
from moe_kernels.routing.build import plan_from_mask
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.routing.top_k import route_top_k
from moe_kernels.testing import edge_cases, plan_on, poisoned_memory, random_probs
from moe_kernels.triton.scores import gather_scores, scatter_dscore


def parts_of(plan, parts):
    part_RX = torch.randn(plan.R, parts, generator=torch.Generator().manual_seed(1))
    part_RX[int(plan.expert_offsets_E1[-1]) :] = float("nan")
    return part_RX


def expected_dscore(part_RX, plan):
    dscore_R = part_RX[:, 0].clone()
    for column in range(1, part_RX.shape[1]):
        dscore_R += part_RX[:, column]
    return in_torch.scatter_dscore(dscore_R, plan)


PLANS = {
    **{case.name: case.plan for case in edge_cases()},
    "1024 experts": route_top_k(random_probs(50, 1024, seed=0), 20).plan,
    "more rows than one program's": route_top_k(random_probs(300, 9, seed=0), 5).plan,
}


@pytest.mark.parametrize("name", PLANS)
def test_each_used_row_gets_its_pairs_score_and_no_other_row_is_written(device, name):
    plan = PLANS[name]
    used = int(plan.expert_offsets_E1[-1])
    score_TE = torch.rand(plan.T, plan.E, generator=torch.Generator().manual_seed(0)) + 1
    with poisoned_memory():
        score_R = gather_scores(score_TE.to(device), plan_on(plan, device)).cpu()
    assert torch.equal(score_R[:used], in_torch.gather_scores(score_TE, plan)[:used])
    assert score_R[used:].isnan().all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_parts_are_summed_in_order_into_their_pairs_and_everything_else_is_zero(device, name, parts):
    plan = PLANS[name]
    part_RX = parts_of(plan, parts)
    with poisoned_memory():
        dscore_TE = scatter_dscore(part_RX.to(device), plan_on(plan, device)).cpu()
    assert torch.equal(dscore_TE, expected_dscore(part_RX, plan))
    assert int((dscore_TE != 0).sum()) == int(plan.expert_offsets_E1[-1])


def test_the_pair_that_unused_rows_name_keeps_its_own_gradient(device):
    keep_TE = torch.zeros(20, 3, dtype=torch.bool)
    keep_TE[0, 0] = keep_TE[19, 2] = True
    plan = plan_from_mask(keep_TE, R=9)  # seven rows name (token 0, expert 0) and are unused
    part_RX = parts_of(plan, 2)
    dscore_TE = scatter_dscore(part_RX.to(device), plan_on(plan, device)).cpu()
    assert torch.equal(dscore_TE[keep_TE], part_RX[:2, 0] + part_RX[:2, 1])
    assert (dscore_TE[~keep_TE] == 0).all()


def test_no_tokens_give_no_gradients(device):
    nothing = torch.zeros(0, dtype=torch.int32)
    plan = RoutingPlan(
        nothing, nothing, torch.zeros(4, dtype=torch.int32), nothing.new_zeros(1), nothing, T=0, E=3, R=0
    )
    assert scatter_dscore(torch.zeros(0, 2, device=device), plan_on(plan, device)).shape == (0, 3)
    assert gather_scores(torch.zeros(0, 3, device=device), plan_on(plan, device)).shape == (0,)


@pytest.mark.gpu
def test_pairs_past_32_bits_are_found():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    T, E = 2**21 + 8, 1024  # T * E is above 2**31: 8.6 GB of scores
    plan = plan_on(route_top_k(torch.eye(16, E).repeat(1, 1), 1).plan, "cuda")
    last = T - 16
    moved = replace(
        plan,
        token_R=plan.token_R + last,
        token_offsets_T1=torch.cat([plan.token_offsets_T1.new_zeros(last), plan.token_offsets_T1]),
        T=T,
    )
    score_TE = torch.zeros(T, E, device="cuda")
    score_TE[last:] = torch.rand(16, E, device="cuda") + 1
    assert torch.equal(gather_scores(score_TE, moved), in_torch.gather_scores(score_TE[last:].contiguous(), plan))
    part_RX = torch.rand(plan.R, 2, device="cuda") + 1
    dscore_TE = scatter_dscore(part_RX, moved)
    assert torch.equal(dscore_TE[last:], in_torch.scatter_dscore(part_RX[:, 0] + part_RX[:, 1], plan))
    assert not bool(dscore_TE[:last].any())
