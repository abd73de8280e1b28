"""The plan in two launches: the bits of the torch builder, whatever is kept and however it is named."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels import check_plan
from moe_kernels.routing.build import mask_from_experts, plan_from_mask_torch
from moe_kernels.testing import poisoned_memory
from moe_kernels.triton import plan as kernels

FIELDS = ("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R")
# (T, E): one of each, experts in one group and in several, several tiles with a last one that is not full.
SHAPES = [(1, 1), (5, 3), (37, 130), (150, 20), (9, 1024)]


def assert_same_plan(actual, expected):
    for name in FIELDS:
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert (actual.T, actual.E, actual.R) == (expected.T, expected.E, expected.R)


def random_mask(T, E, density, seed=0):
    return torch.rand(T, E, generator=torch.Generator().manual_seed(seed)) < density


@pytest.mark.parametrize(("T", "E"), SHAPES)
@pytest.mark.parametrize(("density", "spare_rows"), [(0.3, 5), (1.0, 0), (0.0, 3)])
def test_any_mask_gives_the_torch_builders_plan(device, T, E, density, spare_rows):
    keep_TE = random_mask(T, E, density)
    R = int(keep_TE.sum()) + spare_rows
    with poisoned_memory():
        actual = kernels.plan_from_mask(keep_TE.to(device), R=R)
    assert_same_plan(actual, plan_from_mask_torch(keep_TE, R=R))
    check_plan(actual, keep_TE)


@pytest.mark.parametrize(("T", "E"), [(700, 16), (400, 200)])
def test_tiles_of_several_chunks_give_the_torch_builders_plan(device, monkeypatch, T, E):
    monkeypatch.setattr(kernels, "_MAX_TILES", 3)
    monkeypatch.setattr(kernels, "_COUNTS_AT_A_TIME", 2 * min(E, 128))  # two tiles' counts
    assert kernels.tiling(T, E).num_tiles > 1
    assert kernels.tiling(T, E).tokens > kernels._CHUNK
    keep_TE = random_mask(T, E, 0.2)
    R = int(keep_TE.sum()) + 1
    assert_same_plan(kernels.plan_from_mask(keep_TE.to(device), R=R), plan_from_mask_torch(keep_TE, R=R))


@pytest.mark.parametrize("T", [1, 40960, 2**20, 2**24])
def test_counts_of_a_tile_fit_in_16_bits(T):
    tiles = kernels.tiling(T, 64)
    assert tiles.tokens < 2**15
    assert (tiles.num_tiles - 1) * tiles.tokens < T <= tiles.num_tiles * tiles.tokens


def test_a_transposed_mask_gives_the_same_plan(device):
    keep_ET = random_mask(6, 40, 0.4)
    R = int(keep_ET.sum())
    assert_same_plan(kernels.plan_from_mask(keep_ET.to(device).t(), R=R), plan_from_mask_torch(keep_ET.t(), R=R))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_foreign_and_repeated_ids_are_dropped(device, dtype):
    expert_TK = torch.randint(-2, 9, (61, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    expert_TK[:3] = torch.tensor([[-1, 7, 2**31 - 1, -(2**31)], [0, 0, 0, 0], [6, 5, 4, 3]])
    expected = plan_from_mask_torch(mask_from_experts(expert_TK, 7), R=61 * 4)
    assert_same_plan(kernels.plan_from_experts(expert_TK.to(device), 7, R=61 * 4), expected)


def test_more_pairs_than_rows_write_nothing_past_the_rows(device):
    keep_TE = torch.ones(50, 4, dtype=torch.bool)
    expected = plan_from_mask_torch(keep_TE, R=200)
    actual = kernels.plan_from_mask(keep_TE.to(device), R=70)
    for name in ("token_R", "expert_R", "row_by_token_R"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)[:70]), name
    assert actual.expert_offsets_E1.tolist() == [0, 50, 100, 150, 200]


def test_no_tokens_and_no_rows_give_an_empty_plan(device):
    plan = kernels.plan_from_mask(torch.zeros(0, 3, dtype=torch.bool, device=device), R=2)
    check_plan(plan, torch.zeros(0, 3, dtype=torch.bool))
    plan = kernels.plan_from_mask(torch.zeros(4, 3, dtype=torch.bool, device=device), R=0)
    assert_same_plan(plan, plan_from_mask_torch(torch.zeros(4, 3, dtype=torch.bool), R=0))


def test_torch_compile_takes_the_operators_whole(device):
    keep_TE = random_mask(30, 5, 0.4).to(device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(keep_TE, expert_TK):
        return kernels.plan_from_mask(keep_TE & True, R=150), kernels.plan_from_experts(expert_TK + 1, 5, R=60)

    expert_TK = torch.randint(0, 5, (30, 2), device=device)
    by_mask, by_ids = compiled(keep_TE, expert_TK)
    assert_same_plan(by_mask, plan_from_mask_torch(keep_TE.cpu(), R=150))
    check_plan(by_ids)
    for op, arguments in (
        (torch.ops.gristmill.plan_from_mask, (keep_TE, 150)),
        (torch.ops.gristmill.plan_from_experts, (expert_TK, 5, 60)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
