"""The gather-sum against the reference's, and its choice of block; with the other ops: ../cute/test_gpu_ops.py."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.routing.top_k import route_top_k
from moe_kernels.testing import edge_cases, plan_on, poisoned_memory, random_probs
from moe_kernels.triton.combine import block_width, combine_rows

PLANS = {
    **{case.name: case.plan for case in edge_cases()},
    "more rows than are loaded at a time": route_top_k(random_probs(30, 40, seed=0), 19).plan,
}


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("name", PLANS)
def test_each_token_gets_the_sum_of_its_rows(device, name, weighted):
    plan, generator = PLANS[name], torch.Generator().manual_seed(0)
    rows_RD, score_R = torch.randn(plan.R, 264, generator=generator), torch.rand(plan.R, generator=generator)
    for unused in (rows_RD, score_R):
        unused[int(plan.expert_offsets_E1[-1]) :] = float("nan")
    scores = score_R if weighted else None
    expected_TD = ReferenceBackend().combine(rows_RD, scores, plan)
    with poisoned_memory():
        out_TD = combine_rows(rows_RD.to(device), scores.to(device) if weighted else None, plan_on(plan, device))
    torch.testing.assert_close(out_TD.cpu(), expected_TD)


@pytest.mark.parametrize(
    ("D", "width"),
    [(256, 256), (768, 256), (1536, 512), (2048, 512), (4096, 512), (2880, 512), (200, 256), (8, 256)],
)
def test_blocks_leave_few_lanes_idle(D, width):
    assert block_width(D) == width
