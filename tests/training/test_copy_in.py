"""FSDP's messages hold what torch's own operators put there, and FSDP lets them be filled so."""

import pytest
import torch

from training import copy_in as copy_in_module
from training.copy_in import gather_in, scatter_in
from training.parallel import copy_by_rows

EVEN = [(8, 3, 5), (4,), (12, 2), (4, 7)]
UNEVEN = [(8, 3), (5,), (2, 2)]


def both(tensors: list[torch.Tensor], num_chunks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's rows and ours, each written over numbers that may not stay."""
    width = sum(-(-tensor.shape[0] // num_chunks) * tensor[0].numel() for tensor in tensors)
    expected, actual = (torch.full((num_chunks, width), float("nan"), dtype=dtype) for _ in range(2))
    torch._chunk_cat(tensors, 0, num_chunks, out=expected)
    scatter_in(tensors, 0, num_chunks, actual)
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


@pytest.mark.parametrize("worth_a_launch", [1, 10, 1 << 20])
def test_what_is_gathered_lies_side_by_side_in_this_processs_part(
    monkeypatch: pytest.MonkeyPatch, worth_a_launch: int
) -> None:
    monkeypatch.setattr(copy_in_module, "_WORTH_A_LAUNCH", worth_a_launch)
    tensors = [torch.randn(n) for n in (24, 1, 5)]
    whole = torch.full((90,), float("nan"))
    own, same = gather_in(tensors, whole, [24, 1, 5], 30, 2)
    assert same is whole
    assert own.data_ptr() == whole[60:].data_ptr()
    assert torch.equal(whole[60:], torch.cat(tensors))
    assert whole[:60].isnan().all()


def test_fsdp_of_this_torch_calls_the_operators_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    assert copy_by_rows("cpu")
    seen = []
    monkeypatch.setattr(torch, "_chunk_cat", lambda *_, **__: seen.append("torch's"))
    rows = torch.full((6,), float("nan"))
    _fsdp_collectives.foreach_reduce_scatter_copy_in([torch.arange(6.0).view(2, 3)], rows, 2)
    assert rows.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not seen
    copied = []
    monkeypatch.setattr(copy_in_module, "copy_rows", lambda *_: copied.append("ours"))
    torch.ops.fsdp.all_gather_copy_in([torch.ones(3)], torch.zeros(6), [3], 3, 0)
    assert copied


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("width", [4096 * 2, 4097, 5])
def test_rows_are_cast_as_torch_casts_them(dtype: torch.dtype, wide: torch.dtype, width: int) -> None:
    pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")
    from training.cast_rows import cast_rows

    source = torch.randn(3, width, device="cuda").to(dtype)
    around = torch.full((3, width + 7), float("nan"), device="cuda", dtype=wide)
    cast_rows(source, around[:, 3:-4])
    assert torch.equal(around[:, 3:-4], source.to(wide))
    assert around[:, :3].isnan().all()
    assert around[:, -4:].isnan().all()
