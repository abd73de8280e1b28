"""The same step on 1, 2 and 4 processes, however it is accumulated, checkpointed and sharded.

One process group for each number of processes, not for each case: a worker runs all its cases and writes what it found.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

import training.parallel
import training.peer_copies
from data.batch import Batch
from model.config import AttentionConfig, ModelConfig, MoEConfig, RouterKind, RoutingConfig
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, RoutingKind, resolve_backend
from tests.training.processes import FileBlock, free_port, join
from training.audit import audit_first_step, check_weights
from training.config import (
    ActivationCheckpointing,
    BalanceScope,
    DeviceName,
    OptimConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from training.optim import build_optimizer
from training.parallel import build_parallel
from training.step import MicroBatch, StepInput, train_step
from training.world import World

SEQUENCES, POSITIONS, VOCABULARY = 2, 16, 50
TOKENS = SEQUENCES * POSITIONS


@dataclass(frozen=True)
class Case:
    """One way to take the same optimiser step."""

    num_micro_batches: int
    routing: RoutingKind
    balance: BalanceScope
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    shard_degree: int | None = None
    router: RouterKind = RouterKind.softmax
    num_experts: int = 4
    mask_documents: bool = False
    tie_embeddings: bool = False
    compiled: bool = False
    prefetch_blocks: int = 0
    sum_every_micro_batch: bool = False
    exchange_gradients: bool = False
    peer_copies: bool = False
    gather_in_place: bool = False
    num_layers: int = 2
    blocks_per_unit: int = 1
    reshard_after_forward: bool = True

    @property
    def problem(self) -> str:
        """The step itself, whatever computes it."""
        names = (self.routing.name, self.balance.name, self.router.name, str(self.num_experts))
        switches = ("-documents" if self.mask_documents else "") + ("-tied" if self.tie_embeddings else "")
        switches += f"-{self.num_layers}layers" if self.num_layers != 2 else ""
        return f"{self.num_micro_batches}-" + "-".join(names) + switches

    @property
    def name(self) -> str:
        knobs = f"-prefetch{self.prefetch_blocks}" if self.prefetch_blocks else ""
        knobs += f"-unit{self.blocks_per_unit}" if self.blocks_per_unit > 1 else ""
        knobs += "-sum" * self.sum_every_micro_batch + "-gathered_once" * (not self.reshard_after_forward)
        knobs += "-exchange" * self.exchange_gradients + "-peers" * self.peer_copies
        knobs += "-in_place" * self.gather_in_place
        way = f"{self.checkpointing.name}{'-compiled' * self.compiled}-shard{self.shard_degree}"
        return f"{self.problem}-{way}{knobs}"


ROUTINGS = (RoutingKind.top_k, RoutingKind.token_rounding)
BALANCES = tuple(BalanceScope)
PROBLEMS = [Case(number, routing, balance) for number in (4, 16) for routing in ROUTINGS for balance in BALANCES]
SIGMOID = Case(4, RoutingKind.token_rounding, BalanceScope.micro_batch, router=RouterKind.sigmoid)
FEW_EXPERTS = Case(4, RoutingKind.top_k, BalanceScope.micro_batch, num_experts=2)  # cut along their width on 4
# 32 tokens for 32 experts and tiles of 8 rows: most experts get none.
IDLE_EXPERTS = Case(4, RoutingKind.token_rounding, BalanceScope.micro_batch, num_experts=32)
MASKED = Case(4, RoutingKind.token_rounding, BalanceScope.micro_batch, mask_documents=True)
TIED = Case(4, RoutingKind.token_rounding, BalanceScope.micro_batch, tie_embeddings=True)
COMPILED = replace(MASKED, compiled=True, checkpointing=ActivationCheckpointing.elementwise)
DEEPER = Case(4, RoutingKind.token_rounding, BalanceScope.micro_batch, num_layers=3)
UNEVEN = Case(4, RoutingKind.top_k, BalanceScope.micro_batch, num_experts=5)  # 4 processes hold 2, 2, 1 and none
SINGLE = (FEW_EXPERTS, IDLE_EXPERTS, MASKED, TIED, DEEPER, UNEVEN)
# Two blocks in one unit and the third alone.
UNITS = [replace(case, blocks_per_unit=2) for case in (DEEPER, replace(FEW_EXPERTS, prefetch_blocks=1))]
UNITS += [
    replace(DEEPER, blocks_per_unit=2, checkpointing=mode, reshard_after_forward=False)
    for mode in (ActivationCheckpointing.selective, ActivationCheckpointing.full)
]
EXCHANGES = [
    replace(case, exchange_gradients=True)
    for case in (PROBLEMS[-1], replace(PROBLEMS[-1], sum_every_micro_batch=True), UNEVEN, FEW_EXPERTS, TIED)
]
CUTS = (PROBLEMS[-1], UNEVEN, FEW_EXPERTS, TIED, replace(DEEPER, blocks_per_unit=2, prefetch_blocks=2))
PEERS = [replace(case, peer_copies=True) for case in CUTS]
PEERS += [replace(PEERS[0], checkpointing=ActivationCheckpointing.full, reshard_after_forward=False)]
IN_PLACE = [
    replace(case, gather_in_place=True, reshard_after_forward=False, peer_copies=peers)
    for case in CUTS
    for peers in (False, True)
]
# elementwise is selective that keeps every product.
MODES = (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full)


def checkpointed(case: Case) -> list[Case]:
    return [Case(**(vars(case) | {"checkpointing": mode})) for mode in MODES]


def cases_of(world_size: int) -> list[Case]:
    if world_size == 1:
        return [*PROBLEMS, *checkpointed(SIGMOID), *SINGLE]
    ways = [way for case in PROBLEMS if case.num_micro_batches == 4 for way in checkpointed(case)]
    ways += [case for case in PROBLEMS if case.num_micro_batches == 16]
    hybrid = [Case(**(vars(way) | {"shard_degree": 2})) for way in ways] if world_size == 4 else []
    return [
        *ways,
        *hybrid,
        *checkpointed(SIGMOID),
        *SINGLE,
        replace(PROBLEMS[-1], prefetch_blocks=1, sum_every_micro_batch=True),
        *EXCHANGES,
        *PEERS,
        *IN_PLACE,
        *([replace(case, shard_degree=2) for case in (PEERS[0], IN_PLACE[0])] if world_size == 4 else []),
        *UNITS,
        replace(PROBLEMS[-1], shard_degree=1),  # every process holds a whole copy
        # Every process compiles for itself, which takes it seconds.
        *([COMPILED, replace(IN_PLACE[0], compiled=True, num_micro_batches=4)] if world_size == 2 else []),
    ]


def model_config(case: Case) -> ModelConfig:
    routing = RoutingConfig(tile_m=8, train=case.routing)
    moe = MoEConfig(
        num_experts=case.num_experts, experts_per_token=2, expert_width=8, router=case.router, routing=routing
    )
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_width=8)
    return ModelConfig(
        vocab_size=VOCABULARY,
        width=16,
        num_layers=case.num_layers,
        attention=attention,
        moe=moe,
        tie_embeddings=case.tie_embeddings,
    )


def micro_batch(number: int) -> MicroBatch:
    """Return micro-batch ``number`` of the step; they differ in their valid labels, and number 1 has none."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < (1.0 if number == 1 else 0.15 * (number % 5))] = -100
    start_BS = torch.randint(1, POSITIONS, (SEQUENCES, 1), generator=generator)
    batch = Batch(ids[:, :-1], labels, (torch.arange(POSITIONS) >= start_BS).int())  # two documents a row
    return MicroBatch.of(batch, first_sample=number * SEQUENCES)


def take_step(case: Case, world: World) -> dict[str, Any]:
    config = model_config(case)
    problem = moe_problem(config, tokens=TOKENS, dtype=torch.float32, device=world.device)
    backend = resolve_backend(BackendName.reference, problem)
    model = build_parallel(
        lambda: Decoder(config, backend=backend),
        world,
        ParallelConfig(
            activation_checkpointing=case.checkpointing,
            shard_degree=case.shard_degree,
            compile=case.compiled,
            prefetch_blocks=case.prefetch_blocks,
            blocks_per_unit=case.blocks_per_unit,
            reshard_after_forward=case.reshard_after_forward,
            exchange_gradients=case.exchange_gradients,
            peer_copies=case.peer_copies,
            gather_in_place=case.gather_in_place,
        ),
        precision=Precision.fp32,
        seed=0,
    )
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
    mine = range(world.rank, case.num_micro_batches, world.size)
    result = train_step(
        model,
        optimizer,
        StepInput(micro_batches=[micro_batch(number) for number in mine], mask_documents=case.mask_documents),
        world=world,
        # Clipped hard, so that a norm that differs changes every gradient.
        config=TrainConfig(
            num_steps=1,
            micro_batch_sequences=SEQUENCES,
            global_batch_sequences=SEQUENCES * case.num_micro_batches,
            max_grad_norm=0.5,
            load_balance_weight=1.0,
            router_z_weight=0.1,
            balance_scope=case.balance,
            expert_bias_rate=0.25,
        ),
        routing=case.routing,
        lap=lambda part: None,
        sum_every_micro_batch=case.sum_every_micro_batch,
    )
    audit_first_step(model, optimizer)
    check_weights(model, 1)
    if case.gather_in_place:  # all but what is uneven or cut along its width
        parts = [parameter._local_tensor for parameter in model.parameters()]
        num_in_place = sum(hasattr(part, "fsdp_pre_all_gather") for part in parts)
        assert num_in_place >= (4 if case.num_experts != 4 else 10), f"{case.name}: {num_in_place} of {len(parts)}"
    return {
        "losses": torch.stack(result.losses).double(),
        "grad_norm": result.grad_norm.double(),
        "counts": result.load.top_k_count_LE,
        "rows": result.load.rows_L,
        "added": result.load.pairs_added_L,
        "dropped": result.load.pairs_dropped_L,
        "gradients": {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        "parameters": {name: whole(p) for name, p in model.named_parameters()},
        "biases": [moe.router.expert_bias for moe in model.moe_layers() if moe.router.expert_bias is not None],
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def fail(problem: Exception) -> None:
    raise problem


def work(rank: int, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world = join(rank, world_size, port, DeviceName.cpu)
    training.peer_copies.SymmetricBlock = partial(FileBlock, folder)
    training.parallel.LARGE_PART = 4  # values: all parameters of the test's
    assert world.any(world.rank == 1)  # one that was asked to stop stops all
    assert not world.any(False)
    assert world.first(lambda: "made") == "made"
    for problem in (OSError("the disk is full"), ValueError("run.name")):  # in the first alone, and all hear of it
        with pytest.raises(type(problem), match=str(problem)):
            world.first(partial(fail, problem))
    # Compiled as for a GPU but for the code in the end, which takes minutes to make on a CPU.
    training.parallel.compile_blocks = partial(training.parallel.compile_blocks, backend="aot_eager")
    for case in cases_of(world_size):
        result = take_step(case, world)
        if world.is_first:
            torch.save(result, folder / f"{case.name}.pt")
        assert bool(FileBlock.numbers) == case.peer_copies
        FileBlock.numbers.clear()
    world.leave(0)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The step of each problem in one process."""
    world = World(rank=0, size=1, device=torch.device("cpu"))
    return {case.name: take_step(case, world) for case in cases_of(1)}


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """All cases on several processes."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp(f"world{world_size}")
    mp.spawn(work, args=(world_size, free_port(), folder), nprocs=world_size)
    return world_size, {case.name: torch.load(folder / f"{case.name}.pt") for case in cases_of(world_size)}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def assert_same_step(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Check counts bit for bit and everything else norm-wise; return the largest deviation."""
    for name in ("counts", "rows", "added", "dropped"):
        assert torch.equal(actual[name], expected[name]), name
    for left, right in zip(actual["biases"], expected["biases"], strict=True):
        assert torch.equal(left, right)
    deviations = {name: error(actual[name], expected[name]) for name in ("losses", "grad_norm")}
    for name, gradient in expected["gradients"].items():
        deviations[name] = error(actual["gradients"][name], gradient)
    worst = max(deviations, key=lambda name: deviations[name])
    assert deviations[worst] < 1e-5, f"{worst}: {deviations[worst]:.2e}"
    return deviations[worst]


def test_the_step_is_the_same_on_any_number_of_processes(
    together: tuple[int, dict[str, Any]], alone: dict[str, dict[str, Any]], record_property: Any
) -> None:
    world_size, results = together
    by_problem = {case.problem: alone[case.name] for case in cases_of(1)}
    largest: dict[str, float] = {}
    for case in cases_of(world_size):
        largest[case.name] = assert_same_step(results[case.name], by_problem[case.problem])
    record_property("largest_deviations", json.dumps(largest))
    # What docs/distributed.md shows, in the test's output with -rP.
    for name, deviation in largest.items():
        print(f"{world_size} processes  {name:<60} {deviation:.1e}")


def test_checkpointing_changes_no_count_and_moves_no_bias_twice(alone: dict[str, dict[str, Any]]) -> None:
    plain, *others = (alone[case.name] for case in checkpointed(SIGMOID))
    for other in others:
        assert_same_step(other, plain)
    assert all(bool((bias.abs() <= 0.25).all()) and bias.count_nonzero() > 0 for bias in plain["biases"])


def test_problems_differ_from_each_other(alone: dict[str, dict[str, Any]]) -> None:
    norms = [float(alone[case.name]["losses"][-1]) for case in [*PROBLEMS, MASKED]]
    assert len(set(norms)) == len(norms)


def test_experts_are_cut_along_their_width_where_processes_outnumber_them() -> None:
    # FEW_EXPERTS on 4 processes is in the grid above; a width that does not divide is refused.
    from training.parallel import _expert_placement

    config = model_config(FEW_EXPERTS)
    problem = moe_problem(config, tokens=TOKENS, dtype=torch.float32, device=torch.device("cpu"))
    block = Decoder(config, backend=resolve_backend(BackendName.reference, problem)).blocks[0]
    placement = _expert_placement([block], 4)
    assert placement(block.moe.w_gate_up) == placement(block.moe.w_down)
    assert placement(block.moe.w_gate_up).dim == 1
    assert placement(block.moe.router.weight) is None
    with pytest.raises(ValueError, match=r"parallel\.shard_degree"):
        _expert_placement([block], 3)


def test_most_experts_are_idle_where_that_is_tried(alone: dict[str, dict[str, Any]]) -> None:
    rows_L = alone[IDLE_EXPERTS.name]["rows"]
    assert bool((rows_L > 0).all())
    # Every expert that has rows has a tile of 8 in one of the four micro-batches.
    assert bool((rows_L // 8 < 4 * 32 / 2).all())
