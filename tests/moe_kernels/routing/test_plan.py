"""The plan: what the builder promises, and that check_plan sees every broken promise."""

from dataclasses import replace

import pytest
import torch

from moe_kernels import check_plan
from moe_kernels.routing.build import mask_from_experts, plan_from_mask

KEEP_TE = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)


def test_rows_are_by_expert_then_token_and_a_tokens_rows_by_expert():
    plan = plan_from_mask(KEEP_TE, R=8)
    assert plan.token_R.tolist() == [0, 2, 3, 0, 2, 0, 0, 0]
    assert plan.expert_R.tolist() == [0, 0, 0, 2, 2, 0, 0, 0]
    assert plan.expert_offsets_E1.tolist() == [0, 3, 3, 5]
    assert plan.token_offsets_T1.tolist() == [0, 2, 2, 4, 5]
    assert plan.row_by_token_R.tolist() == [0, 3, 1, 4, 2, 0, 0, 0]
    check_plan(plan, KEEP_TE)


def test_foreign_expert_ids_are_dropped():
    expert_TK = torch.tensor([[0, 2], [-1, 3], [2, 0], [0, 2**31]])
    assert torch.equal(mask_from_experts(expert_TK, 3), KEEP_TE)
    check_plan(plan_from_mask(mask_from_experts(expert_TK, 3), R=8), KEEP_TE)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("token_R", [2, 0, 3, 0, 2, 0], "order"),
        ("token_R", [0, 2, 4, 0, 2, 0], "outside"),
        ("token_R", [0, 0, 3, 0, 2, 0], "order"),
        ("token_R", [0, 2, 3, 0, 2, 1], "must hold 0"),
        ("expert_R", [0, 0, 1, 2, 2, 0], "disagrees"),
        ("expert_offsets_E1", [0, 3, 2, 5], "never fall"),
        ("expert_offsets_E1", [0, 3, 3, 7], "capacity"),
        ("expert_offsets_E1", [1, 3, 3, 5], "start at 0"),
        ("token_offsets_T1", [0, 2, 2, 4, 6], "tokens own"),
        ("token_offsets_T1", [0, 1, 2, 4, 5], "row_by_token_R"),
        ("row_by_token_R", [3, 0, 1, 4, 2, 0], "row_by_token_R"),
    ],
)
def test_a_broken_plan_is_named(field, values, message):
    plan = plan_from_mask(KEEP_TE, R=6)
    with pytest.raises(ValueError, match=message):
        check_plan(replace(plan, **{field: torch.tensor(values, dtype=torch.int32)}))


def test_wrong_pairs_dtype_and_shape_are_named():
    plan = plan_from_mask(KEEP_TE, R=6)
    with pytest.raises(ValueError, match="other pairs"):
        check_plan(plan, ~KEEP_TE)
    with pytest.raises(ValueError, match="int64"):
        check_plan(replace(plan, token_R=plan.token_R.long()))
    with pytest.raises(ValueError, match="R=7"):
        check_plan(replace(plan, R=7))
