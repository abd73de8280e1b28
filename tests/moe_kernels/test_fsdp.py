"""Under FSDP-2 on two processes, gradients are those of one process that sees both micro-batches."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, init_device_mesh

from moe_kernels import (
    BackendName,
    MoEProblem,
    Rounding,
    RoutingKind,
    moe_experts,
    resolve_backend,
    route_token_rounding,
)

T, D, N, E, K = 48, 16, 8, 4, 2
WORLD = 2


class Layer(nn.Module):
    """A router and its experts, with token rounding."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(E, D, generator=generator))
        self.w_gate_up = nn.Parameter(torch.randn(E, 2 * N, D, generator=generator) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, N, generator=generator) * N**-0.5)
        problem = MoEProblem(
            T=T, D=D, N=N, E=E, K=K, tile_m=8, routing=RoutingKind.token_rounding, dtype=torch.float32, arch="cpu"
        )
        self.backend = resolve_backend(BackendName.portable, problem)

    def forward(self, x_TD):
        prob_TE = (x_TD @ self.router.t()).softmax(-1)
        plan = route_token_rounding(prob_TE, K, tile_m=8, rounding=Rounding.nearest).plan
        return x_TD + moe_experts(x_TD, self.w_gate_up, self.w_down, prob_TE, plan, backend=self.backend)


def micro_batch(rank):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(10 + rank))


def loss_of(model, rank):
    return model(micro_batch(rank)).square().sum()


def train_shard(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    for dim in (0, 1):
        layers = nn.Sequential(Layer(), Layer())
        for module in (*layers, layers):
            fully_shard(module, mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(dim if p.dim() == 3 else 0))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        loss_of(layers, rank).backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in layers.named_parameters()}
        if rank == 0:
            torch.save(gradients, f"{results}/shard_{dim}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # taking the interpreter down while gloo's threads hold tensors can abort the process


def test_two_ranks_give_the_gradients_of_one_process(tmp_path):
    mp.spawn(train_shard, args=(tmp_path / "store", tmp_path), nprocs=WORLD)
    layers = nn.Sequential(Layer(), Layer())
    sum(loss_of(layers, rank) for rank in range(WORLD)).backward()
    for dim in (0, 1):
        gradients = torch.load(tmp_path / f"shard_{dim}.pt")
        assert gradients.keys() == dict(layers.named_parameters()).keys()
        for name, parameter in layers.named_parameters():
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error <= 1e-6, (name, error)  # two fp32 sums in another order
