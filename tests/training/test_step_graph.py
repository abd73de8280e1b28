"""A recorded step is the step: on a CPU with a stand-in for the graph, on a GPU with a CUDA graph."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves

import model.attend
import training.parallel
from tests.training.test_distributed import whole
from tests.training.test_guard import without_labels
from tests.training.test_trainer import logged
from training.config import RunConfig
from training.step import Accumulated, MicroBatch
from training.step_graph import Recording, StepGraph, check_step_graph, record_on_device
from training.trainer import EXIT_DONE, Trainer
from training.world import World

pytestmark = pytest.mark.usefixtures("small_parts_in_place")
# An evaluation comes between the plain steps and the first recorded one, and later ones between recorded steps.
LINES = ("logging.every_steps=1", "evaluation.every_steps=3", "checkpoint.every_steps=0", "train.num_steps=9")
OVERRIDES = {
    "rounded": ("model.moe.routing.rounding=stochastic", "model.moe.router=sigmoid", "train.balance_scope=global_step"),
    "ramped": ("train.batch_ramp=[{until_step: 5, sequences: 8}]", "train.global_batch_sequences=16"),
    "gathered once": (
        *("train.precision=bf16", "parallel.reshard_after_forward=false", "parallel.gather_in_place=true"),
        "data.mask_documents=true",
    ),
}


class Replayed:
    """Does the recorded work again, into the tensors of the first time, as a CUDA graph does."""

    def __init__(self, decoder: torch.nn.Module, work: Callable[[], Accumulated]) -> None:
        assert_nothing_is_gathered(decoder)
        self._work = work
        self._parameters = list(decoder.parameters())
        self.found = work()
        self._gradients = [parameter.grad for parameter in self._parameters]
        self.num_replays = 0
        self.is_reset = False

    def replay(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        again = self._work()
        for place, value in zip(_tensors(self.found), _tensors(again), strict=True):
            place.copy_(value)
        for place, parameter in zip(self._gradients, self._parameters, strict=True):
            place.copy_(parameter.grad)
        self.num_replays += 1
        for parameter in self._parameters:
            parameter.grad = None  # a graph knows nothing of them

    def reset(self) -> None:
        self._work = lambda: pytest.fail("it was reset")
        self.is_reset = True


def assert_nothing_is_gathered(decoder: torch.nn.Module) -> None:
    """Assert that the next forward gathers all parameters, whichever forwards came before."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            assert state._comm_ctx.post_forward_order == []
            if state._fsdp_param_group is not None:  # that of the root, where others have all parameters
                assert state._fsdp_param_group.is_sharded
                assert state._fsdp_param_group._post_forward_indices == []


def _tensors(found: Accumulated) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def train(config: RunConfig, world: World, graph_of: Callable[[Trainer], StepGraph | None]) -> dict[str, Any]:
    """Return what a whole run logs, its times, memory and compilations apart, and its last parameters."""
    trainer = Trainer(config, world)
    trainer._graph = graph_of(trainer)
    assert trainer.fit() == EXIT_DONE
    measured = ("time/", "throughput/", "memory/", "compile/")  # the last counts since the process began
    lines = [{name: value for name, value in line.items() if not name.startswith(measured)} for line in logged(config)]
    costs = [line for line in logged(config) if "time/step_s" in line][-1]
    return {
        "lines": lines,
        "costs": costs,
        "parameters": {n: whole(p).clone() for n, p in trainer.model.named_parameters()},
    }


def assert_equal(recorded: dict[str, Any], plain: dict[str, Any], *, least: int = 10) -> None:
    assert len(plain["lines"]) >= least
    assert recorded["lines"] == plain["lines"]
    for name, parameter in plain["parameters"].items():
        assert torch.equal(recorded["parameters"][name], parameter), name


def stand_in(graphs: list[Replayed], trainer: Trainer) -> StepGraph:
    """Return what records the steps of ``trainer`` on a CPU; each of its graphs is added to ``graphs``."""

    def record(work: Callable[[], Accumulated]) -> Recording:
        graphs.append(Replayed(trainer.model, work))
        return Recording(graphs[-1], graphs[-1].found, 2**30)

    return StepGraph(trainer.model, record=record)


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_a_run_of_recorded_steps_is_the_run(
    small_run: Callable[..., RunConfig], overrides: tuple[str, ...], sharded_world: World
) -> None:
    graphs: list[Replayed] = []
    options = ("run.device=cpu", "kernels=portable", *LINES, *overrides)
    plain = train(small_run("run.name=plain", *options), sharded_world, lambda trainer: None)
    recorded = train(small_run("run.name=recorded", *options), sharded_world, partial(stand_in, graphs))
    assert_equal(recorded, plain)
    # The first of nine steps is of another kind, because it has no counts of a step before; so is one of a ramp.
    assert [graph.num_replays for graph in graphs] == ([2, 2] if overrides is OVERRIDES["ramped"] else [6])
    assert all(graph.is_reset for graph in graphs)
    assert plain["costs"]["time/forward_s"] > 0
    assert recorded["costs"]["time/forward_s"] == 0
    assert recorded["costs"]["time/backward_s"] > 0


def test_the_graph_goes_before_a_run_that_fails_ends(small_run: Callable[..., RunConfig], sharded_world: World) -> None:
    graphs: list[Replayed] = []
    trainer = Trainer(small_run("run.device=cpu", "kernels=portable", *LINES), sharded_world)
    trainer._graph = stand_in(graphs, trainer)
    deal = trainer._micro_batches

    def spoiled() -> Iterator[MicroBatch]:
        for number, micro in enumerate(deal):
            yield micro if number < 12 else without_labels(micro)

    trainer._micro_batches = spoiled()  # type: ignore[assignment]
    with pytest.raises(FloatingPointError, match="in step 7 "):
        trainer.fit()
    assert [(graph.num_replays, graph.is_reset) for graph in graphs] == [(4, True)]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer._graph.peak_bytes == 0


def test_memory_that_nccl_cannot_register_is_refused(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run("parallel.cuda_graph=true")
    alone, of_two = (World(rank=0, size=size, device=torch.device("cuda")) for size in (1, 2))
    check_step_graph(config, of_two)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_step_graph(config, alone)
    with pytest.raises(ValueError, match=r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.* NCCL_GRAPH_REGISTER=0"):
        check_step_graph(config, of_two)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    check_step_graph(config, of_two)


def test_documents_outside_of_compiled_blocks_are_refused(small_run: Callable[..., RunConfig]) -> None:
    world = World(rank=0, size=1, device=torch.device("cuda"))
    options = ("parallel.cuda_graph=true", "data.mask_documents=true")
    check_step_graph(small_run(*options), world)
    check_step_graph(small_run("parallel.compile=false", "kernels.attention=sdpa", *options), world)
    with pytest.raises(ValueError, match=r"FlexAttention .* Set parallel.compile=true, or kernels.attention=sdpa"):
        check_step_graph(small_run("parallel.compile=false", *options), world)


def test_a_cpu_has_no_graph(small_run: Callable[..., RunConfig]) -> None:
    config = small_run("run.device=cpu", "parallel.cuda_graph=true")
    world = World(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"computes on the cpu: set parallel.cuda_graph=false"):
        Trainer(config, world)
    with pytest.raises(ValueError, match=r"parallel.cuda_graph"):
        check_step_graph(config, world)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
ON_HOPPER = (
    *("train.precision=bf16", "parallel.activation_checkpointing=selective", "kernels=cute_sm90"),
    *("model.moe.routing.tile_m=128", "model.moe.routing.allow_below_one_tile=true", *LINES),
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager", None])
@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_a_run_of_steps_in_a_cuda_graph_is_the_run(
    small_run: Callable[..., RunConfig],
    overrides: tuple[str, ...],
    compiler: str | None,
    sharded_world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The fast kernels add up the gradient of the queries in any order.
    monkeypatch.setattr(model.attend, "_SDPA_KERNELS", [SDPBackend.MATH])
    options = (*ON_HOPPER, *overrides, f"parallel.compile={'false' if compiler is None else 'true'}")
    if compiler is not None:
        torch._dynamo.reset()  # else all cases count towards one limit of compilations
        compile_blocks = partial(training.parallel.compile_blocks, backend=compiler)
        monkeypatch.setattr(training.parallel, "compile_blocks", compile_blocks)
    if compiler != "inductor":
        options = (*options, "kernels.attention=sdpa")  # FlexAttention copies from the host unless inductor compiles it
    plain = train(small_run("run.name=plain", *options), sharded_world, lambda trainer: trainer._graph)
    graphs: list[StepGraph] = []
    recorded = train(
        small_run("run.name=recorded", "parallel.cuda_graph=true", *options),
        sharded_world,
        lambda trainer: graphs.append(trainer._graph) or trainer._graph,  # type: ignore[arg-type, func-returns-value]
    )
    assert isinstance(graphs[0], StepGraph)
    assert_equal(recorded, plain)
    assert recorded["costs"]["memory/peak_gib"] > 0.9 * plain["costs"]["memory/peak_gib"]


@pytest.mark.gpu
@needs_hopper
def test_work_that_waits_is_refused_with_the_knob() -> None:
    waits = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match=r"(?s)not permitted when stream is capturing.*parallel.cuda_graph=false"):
        record_on_device(waits.item)  # type: ignore[arg-type, return-value]
    assert float(waits) == 1  # the device is as usable as before
