"""Checkpoints under FSDP-2 on two CPU ranks: what they save, one process reads, and the other way round."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint.state import TrainState
from checkpoint.store import latest_checkpoint, load_checkpoint, load_weights, save_checkpoint
from checkpoint.tensors import read_weights, saved_weights

STATE = TrainState(step=3, tokens=30, samples=3, wandb_id=None)


def build(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x_TD = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        (model(x_TD) - x_TD[:, :3]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(100 + rank)
    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(3))
    save_checkpoint(Path(folder) / "two", model=model, optimizer=optimizer, state=STATE, config={}, keep=1)
    next_draw = torch.rand(2)

    resumed, resumed_optimizer = build(1, sharded=True)
    torch.manual_seed(0)
    path = latest_checkpoint(Path(folder) / "two")
    assert load_checkpoint(path, model=resumed, optimizer=resumed_optimizer) == STATE
    assert torch.equal(torch.rand(2), next_draw), "each rank has its own random state back"
    train(model, optimizer, range(3, 5))
    train(resumed, resumed_optimizer, range(3, 5))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())

    reshared, reshared_optimizer = build(2, sharded=True)
    load_checkpoint(latest_checkpoint(Path(folder) / "one"), model=reshared, optimizer=reshared_optimizer)
    train(reshared, reshared_optimizer, range(3, 5))
    full = {name: parameter.full_tensor() for name, parameter in reshared.named_parameters()}

    started, _ = build(4, sharded=True)
    load_weights(latest_checkpoint(Path(folder) / "one"), started)
    saved = read_weights(latest_checkpoint(Path(folder) / "one") / "tensors", dict(started.named_parameters()))
    for name, parameter in started.named_parameters():
        assert torch.equal(parameter.full_tensor(), saved[name]), "weights alone start a sharded run"
    if rank == 0:
        torch.save(full, Path(folder) / "continued_on_two.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # taking the interpreter down while gloo's threads hold tensors can abort the process


def test_two_ranks_and_one_read_each_others_checkpoints(tmp_path, caplog):
    torch.set_num_threads(1)
    alone, alone_optimizer = build(0, sharded=False)
    train(alone, alone_optimizer, range(3))
    save_checkpoint(tmp_path / "one", model=alone, optimizer=alone_optimizer, state=STATE, config={}, keep=1)
    # A spawned process imports this file by its name alone.
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        mp.spawn(rank_main, args=(str(tmp_path),), nprocs=2)
    finally:
        sys.path.pop(0)
    train(alone, alone_optimizer, range(3, 5))
    epsilon = torch.finfo(torch.float32).eps
    continued = torch.load(tmp_path / "continued_on_two.pt")
    for name, parameter in alone.named_parameters():
        # Two ranks average two equal gradients, so only the order of one addition differs.
        torch.testing.assert_close(continued[name], parameter.detach(), rtol=16 * epsilon, atol=16 * epsilon)

    folder = latest_checkpoint(tmp_path / "two") / "tensors"
    whole = read_weights(folder, ["0.weight", "2.bias"])
    assert saved_weights(folder)["0.weight"].shape == whole["0.weight"].shape == (7, 4)

    resumed, resumed_optimizer = build(3, sharded=False)
    load_checkpoint(latest_checkpoint(tmp_path / "two"), model=resumed, optimizer=resumed_optimizer)
    assert all(torch.equal(tensor, dict(resumed.named_parameters())[name]) for name, tensor in whole.items())
    train(resumed, resumed_optimizer, range(3, 5))
    for one, other in zip(alone.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=16 * epsilon, atol=16 * epsilon)
