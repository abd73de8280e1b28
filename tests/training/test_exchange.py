"""Gradients that are exchanged in bf16 and summed in fp32 are those of a reduce-scatter in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.training.processes import free_port, join
from training.config import DeviceName
from training.exchange import GradientExchange, SumOfOne, sum_rows
from training.world import World, open_world

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def gradients(
    world: World, *, shards: int, dtype: torch.dtype, micro_batches: int, exchanged: bool
) -> tuple[list, set]:
    """Return the gradients of a small sharded model, and the dtypes that were sent."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))  # rows that no number of processes divides
    shape = (world.size // shards, shards)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if shape[0] > 1 else mesh["shard"]
    layer.to(world.device)
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    sent: set[torch.dtype] = set()
    if exchanged:
        exchange = GradientExchange(shards, dtype)
        exchange.adds_up = micro_batches > 1
        unit = exchange.for_unit()
        layer.set_custom_reduce_scatter(lambda **given: sent.add(given["input_tensor"].dtype) or unit(**given))
        layer._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm.allocate = unit.allocate
    generator = torch.Generator().manual_seed(1 + world.rank)
    for index in range(micro_batches):
        layer.set_requires_gradient_sync(index == micro_batches - 1)
        layer(torch.randn(6, 7, generator=generator).to(world.device)).float().square().sum().backward()
    return [parameter.grad.to_local().clone() for parameter in layer.parameters()], sent


def work(rank: int, size: int, port: int, folder: Path, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    world = join(rank, size, port, DeviceName.cpu)
    for number, case in enumerate(cases):
        plain, _ = gradients(world, **case, exchanged=False)
        torch.save([plain, *gradients(world, **case, exchanged=True)], folder / f"{number}-{rank}.pt")
    world.leave(0)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_of_a_reduce_scatter(size: int, tmp_path: Path) -> None:
    cases = [
        {"shards": shards, "dtype": dtype, "micro_batches": number}
        for shards in {2, size}
        for dtype in DTYPES.values()
        for number in (1, 2)
    ]
    mp.spawn(work, args=(size, free_port(), tmp_path, cases), nprocs=size)
    for number, case in enumerate(cases):
        for rank in range(size):
            plain, exchanged, sent = torch.load(tmp_path / f"{number}-{rank}.pt")
            wide = case["micro_batches"] > 1
            assert sent == {torch.float32 if wide else case["dtype"]}, case
            for expected, actual in zip(plain, exchanged, strict=True):
                assert actual.dtype == torch.float32
                if case["shards"] == 2:  # a sum of two has one order
                    assert torch.equal(actual, expected), case
                else:
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rows_are_added_in_fp32(rows: int, dtype: torch.dtype) -> None:
    rows_RX = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.zeros(5000)
    for row_X in rows_RX:
        expected += row_X.float()
    actual = torch.full((5000,), float("nan"))
    sum_rows(rows_RX, actual)
    assert torch.equal(actual, expected)
    if torch.cuda.is_available():
        on_gpu = torch.full((5000,), float("nan"), device="cuda")
        sum_rows(rows_RX.cuda(), on_gpu)
        assert torch.equal(on_gpu.cpu(), expected)


def test_anything_but_a_sum_is_refused() -> None:
    unit = GradientExchange(1, torch.bfloat16).for_unit()
    with pytest.raises(ValueError, match="gradients are summed"):
        unit(torch.zeros(2), torch.zeros(2), torch.distributed.group.WORLD, torch.distributed.ReduceOp.AVG)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_buffer_of_one_process_becomes_its_gradients(micro_batches: int) -> None:
    world = open_world(DeviceName.cpu)
    found = []
    for comm in (None, SumOfOne()):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        if comm is not None:
            layer.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):  # the second step meets what the first left
            layer.zero_grad()
            for index in range(micro_batches):
                layer.set_requires_gradient_sync(index == micro_batches - 1)
                layer(torch.randn(6, 7, generator=generator)).float().square().sum().backward()
        found.append([parameter.grad.to_local() for parameter in layer.parameters()])
    world.close()
    assert all(float(gradient.norm()) > 0 for gradient in found[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with pytest.raises(ValueError, match="more than one process"):
        SumOfOne()()


def test_what_is_summed_and_the_sum_are_one_tensor() -> None:
    comm, options = SumOfOne(), {"dtype": torch.float32, "device": torch.device("cpu")}
    first, second = comm.allocate((6,), **options), comm.allocate((6,), **options)
    assert first is second
    assert comm.allocate((4,), **options) is not first
