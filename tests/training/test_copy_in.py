"""Rows of a reduce-scatter's input hold what torch's own operator puts there, and FSDP lets them be filled so."""

import pytest
import torch

from training import copy_in as copy_in_module
from training.copy_in import copy_in
from training.parallel import copy_gradients_by_rows

EVEN = [(8, 3, 5), (4,), (12, 2), (4, 7)]
UNEVEN = [(8, 3), (5,), (2, 2)]


def both(tensors: list[torch.Tensor], num_chunks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's rows and ours, each written over numbers that may not stay."""
    width = sum(-(-tensor.shape[0] // num_chunks) * tensor[0].numel() for tensor in tensors)
    expected, actual = (torch.full((num_chunks, width), float("nan"), dtype=dtype) for _ in range(2))
    torch._chunk_cat(tensors, 0, num_chunks, out=expected)
    copy_in(tensors, 0, num_chunks, actual)
    return expected, actual


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize("worth_a_launch", [1, 10, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_torchs_operator(
    monkeypatch: pytest.MonkeyPatch, shapes: list, worth_a_launch: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(copy_in_module, "_WORTH_A_LAUNCH", worth_a_launch)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    expected, actual = both(tensors, 4, torch.float32)
    assert not expected.isnan().any()
    assert torch.equal(actual, expected)


def test_tensors_that_are_not_contiguous_are_copied_too() -> None:
    tensors = [torch.arange(24.0).view(3, 8).t(), torch.arange(8.0)]
    expected, actual = both(tensors, 2, torch.float32)
    assert torch.equal(actual, expected)


def test_fsdp_of_this_torch_calls_the_operator_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    assert copy_gradients_by_rows("cpu")
    seen = []
    monkeypatch.setattr(torch, "_chunk_cat", lambda *_, **__: seen.append("torch's"))
    rows = torch.full((6,), float("nan"))
    _fsdp_collectives.foreach_reduce_scatter_copy_in([torch.arange(6.0).view(2, 3)], rows, 2)
    assert rows.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not seen
