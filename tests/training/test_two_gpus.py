"""A step on two GPUs is the step on one: NCCL, parameters sharded and gathered in bf16, the Hopper kernels inside."""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.attention import SDPBackend

import model.attend
import training.parallel
from data.batch import Batch
from model.config import AttentionConfig, ModelConfig, MoEConfig, RoutingConfig
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, RoutingKind, resolve_backend
from tests.training.processes import free_port, join
from tests.training.test_distributed import error, whole
from training.config import ActivationCheckpointing, DeviceName, OptimConfig, ParallelConfig, Precision, TrainConfig
from training.optim import build_optimizer, set_learning_rate
from training.parallel import build_parallel
from training.step import MicroBatch, StepInput, StepResult, train_step
from training.step_graph import PLAIN_STEPS, StepGraph

SEQUENCES, POSITIONS, VOCABULARY, MICRO_BATCHES = 4, 256, 512, 4
# Sums of four fp32 numbers in another order, of which each rounding is 2^-24.
TOLERANCE = 1e-6


class Case(NamedTuple):
    """One way to take the step."""

    routing: RoutingKind
    checkpointing: ActivationCheckpointing
    compiled: bool = False
    recorded: bool = False
    peer_copies: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        suffix = "-compiled" * self.compiled + "-recorded" * self.recorded + "-peers" * self.peer_copies
        suffix += "-in_place" * self.in_place
        return f"{self.routing.name}-{self.checkpointing.name}{suffix}"


CASES = [
    Case(RoutingKind.top_k, ActivationCheckpointing.none),
    Case(RoutingKind.token_rounding, ActivationCheckpointing.selective),
    Case(RoutingKind.token_rounding, ActivationCheckpointing.selective, compiled=True),
    Case(RoutingKind.top_k, ActivationCheckpointing.selective, compiled=True, recorded=True),
    Case(RoutingKind.top_k, ActivationCheckpointing.selective, peer_copies=True),
    Case(RoutingKind.top_k, ActivationCheckpointing.selective, compiled=True, recorded=True, peer_copies=True),
    Case(RoutingKind.top_k, ActivationCheckpointing.selective, in_place=True),
]
CASES += [CASES[-2]._replace(in_place=True, peer_copies=peers) for peers in (False, True)]


def micro_batch(number: int, device: torch.device) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int32))
    return MicroBatch.of(batch.to(device), first_sample=number * SEQUENCES)


def take_step(rank: int, world_size: int, port: int, folder: Path, case: Case, device: str, backend: str) -> None:
    """Take the step of ``case`` as one of ``world_size`` processes; the first one writes what came of it."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # The fast kernels add up the gradient of the queries in any order.
    model.attend._SDPA_KERNELS = [SDPBackend.MATH]
    # Inductor's kernels sum in other orders in another run, or where other processes take part.
    training.parallel.compile_blocks = partial(training.parallel.compile_blocks, backend="aot_eager")
    training.parallel.LARGE_PART = 1 << 10  # values: all but the norms
    world = join(rank, world_size, port, DeviceName(device))
    config = ModelConfig(
        vocab_size=VOCABULARY,
        width=128,
        num_layers=2,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_width=64),
        moe=MoEConfig(
            num_experts=8, experts_per_token=2, expert_width=64, routing=RoutingConfig(tile_m=128, train=case.routing)
        ),
    )
    problem = moe_problem(config, tokens=SEQUENCES * POSITIONS, dtype=torch.bfloat16, device=world.device)
    kernels = resolve_backend(BackendName(backend), problem)
    decoder = build_parallel(
        partial(Decoder, config, backend=kernels),
        world,
        ParallelConfig(
            activation_checkpointing=case.checkpointing,
            compile=case.compiled,
            peer_copies=case.peer_copies,
            reshard_after_forward=not case.in_place,
            gather_in_place=case.in_place,
            prefetch_blocks=int(case.in_place),
        ),
        precision=Precision.bf16,
        seed=0,
    )
    optimizer = build_optimizer(decoder, OptimConfig(lr=1e-3))
    set_learning_rate(optimizer, 0.0)  # its steps would make much of differences in the last bits of small gradients
    graph = StepGraph(decoder)

    def take(number: int, *, recorded: bool) -> StepResult:
        first = number * MICRO_BATCHES
        mine = range(first + rank, first + MICRO_BATCHES, world_size)
        return train_step(
            decoder,
            optimizer,
            StepInput(micro_batches=[micro_batch(n, world.device) for n in mine]),
            world=world,
            config=TrainConfig(
                num_steps=1,
                micro_batch_sequences=SEQUENCES,
                global_batch_sequences=SEQUENCES * MICRO_BATCHES,
                max_grad_norm=0.5,
                load_balance_weight=0.01,
                router_z_weight=0.001,
            ),
            routing=case.routing,
            lap=lambda part: None,
            run=graph if recorded else None,
        )

    def gradients() -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in decoder.named_parameters()}

    if case.recorded:
        for number in range(1, PLAIN_STEPS + 2):
            take(number, recorded=True)
        with torch.no_grad():
            seen = micro_batch(1, world.device).batch  # an evaluation gathers parameters too
            decoder(seen.input_ids_BS, seen.labels_BS, routing=RoutingKind.top_k)
            for parameter in decoder.parameters():
                parameter.mul_(1.01)
        result, found_gradients = take(0, recorded=True), gradients()
        assert graph.peak_bytes > 0
        again = take(0, recorded=False)
        assert torch.equal(torch.stack(again.losses), torch.stack(result.losses))
        for name, gradient in gradients().items():
            assert torch.equal(gradient, found_gradients[name]), name
    else:
        result, found_gradients = take(0, recorded=False), gradients()
    found = {
        "losses": torch.stack(result.losses).double(),
        "grad_norm": result.grad_norm.double(),
        "rows": result.load.rows_L,
        "gradients": found_gradients,
    }
    if world.is_first:
        torch.save(found, folder / f"{world_size}.pt")
    graph.close()
    world.leave(0)


def steps_of(world_sizes: tuple[int, ...], folder: Path, case: Case, device: str, backend: str) -> list[dict[str, Any]]:
    for size in world_sizes:
        mp.spawn(take_step, args=(size, free_port(), folder, case, device, backend), nprocs=size)
    return [torch.load(folder / f"{size}.pt", map_location="cpu") for size in world_sizes]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_on_two_gpus_is_the_step_on_one(tmp_path: Path, case: Case) -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs two Hopper GPUs")
    one, two = steps_of((1, 2), tmp_path, case, "cuda", "cute_sm90")
    assert torch.equal(one["rows"], two["rows"])
    for name in ("losses", "grad_norm"):
        assert error(two[name], one[name]) < TOLERANCE, name
    for name, gradient in one["gradients"].items():
        assert float(gradient.norm()) > 0, name
        assert error(two["gradients"][name], gradient) < TOLERANCE, name
