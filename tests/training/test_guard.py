"""A gradient that is not finite: the step changes nothing, and the run stops with the step's number."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.store import latest_checkpoint
from tests.training.test_step import SIGMOID, batches, build, step
from training.config import DeviceName, OptimConfig, Precision, RunConfig
from training.guard import StepGuard
from training.optim import build_optimizer, clipped_step
from training.step import MicroBatch
from training.trainer import Trainer
from training.world import World, open_world


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    else:
        assert torch.equal(left, right)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_whose_gradient_is_not_finite_leaves_parameters_optimizer_and_bias(steps_before: int) -> None:
    model = build(config=SIGMOID)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
    for _ in range(steps_before):
        step(model, batches(1, sequences=2), optimizer=optimizer, expert_bias_rate=0.25)
    # Infinite in one place only: everything else would move.
    infinite = model.norm.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), float("inf")))
    before = state_of(model, optimizer)
    result = step(model, batches(1, sequences=2), optimizer=optimizer, expert_bias_rate=0.25)
    after = state_of(model, optimizer)
    assert not torch.isfinite(result.grad_norm)
    assert_equal(after["model"], before["model"])
    for index, state in after["optimizer"].items():
        for name, value in state.items():
            expected = before["optimizer"][index][name] if steps_before else torch.zeros_like(value)
            assert torch.equal(value, expected), name
    infinite.remove()
    step(model, batches(1, sequences=2), optimizer=optimizer, expert_bias_rate=0.25)
    assert not torch.equal(model.norm.weight, before["model"]["norm.weight"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {steps_before + 1}


def test_sharded_parameters_are_left_too() -> None:
    from torch.distributed.fsdp import fully_shard

    world = open_world(DeviceName.cpu)
    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
    before = model.weight.full_tensor().clone()
    for norm in (float("inf"), float("nan"), 3.0):
        model(torch.ones(2, 4)).sum().backward()
        is_finite = clipped_step(optimizer, torch.tensor(norm), max_norm=1.0)
        assert bool(is_finite) is (norm == 3.0)
        assert torch.equal(model.weight.full_tensor(), before) is not bool(is_finite)
    world.close()


def test_the_guard_raises_a_step_later_and_names_the_step() -> None:
    guard, model = StepGuard(), build()
    guard.watch(1, step(model, batches(1, sequences=2)))
    with torch.no_grad():
        model.norm.weight[0] = float("inf")
    guard.watch(2, step(model, batches(1, sequences=2)))
    with pytest.raises(FloatingPointError, match=r"in step 2 the gradient norm is nan"):
        guard.watch(3, step(model, batches(1, sequences=2)))
    with pytest.raises(FloatingPointError, match="in step 3 the gradient norm"):
        guard.settle()
    guard.settle()


def test_the_advice_after_a_gradient_that_is_not_finite_can_be_followed(small_run: Callable[..., RunConfig]) -> None:
    diverging = ("optim.lr=1e10", "optim.warmup_fraction=0")
    world = World(rank=0, size=1, device=torch.device("cpu"))
    trainer = Trainer(small_run(*diverging, "checkpoint.every_steps=0"), world)
    with pytest.raises(FloatingPointError):
        trainer.fit()
    assert trainer.way_around().startswith("Nothing was saved yet: start again with another run.name")
    Trainer(small_run("run.name=second", "run.stop_at_step=1"), world).fit()
    trainer = Trainer(small_run("run.name=second"), world)
    advice = re.search(
        r"run\.name=NEW train\.init_from=\S+ and a lower optim\.lr \(here 0\.003\)", trainer.way_around()
    )
    assert advice is not None
    third = Trainer(small_run(*advice[0].split()[:2], "optim.lr=1e-3"), world)
    assert third.config.run.name == "NEW"
    assert_equal(dict(third.model.state_dict()), dict(trainer.model.state_dict()))


@pytest.fixture
def world(precision: Precision) -> Iterator[World]:
    """Yield the world of one process, which in bf16 shards over itself and has a process group."""
    if precision is Precision.fp32:
        yield World(rank=0, size=1, device=torch.device("cpu"))
        return
    opened = open_world(DeviceName.cpu)
    yield opened
    opened.close()


@pytest.mark.parametrize("precision", Precision)
def test_weights_that_are_not_finite_are_not_saved(
    small_run: Callable[..., RunConfig], precision: Precision, world: World
) -> None:
    common = (f"train.precision={precision.name}", "checkpoint.every_steps=1")
    trainer = Trainer(small_run("run.name=first", *common, "optim.lr=1e300", "optim.warmup_fraction=0"), world)
    with pytest.raises(FloatingPointError, match=r"after step 1 the weights embed\.weight, .* and \d+ others are not"):
        trainer.fit()
    assert latest_checkpoint(trainer.folder.checkpoints) is None
    trainer = Trainer(small_run("run.name=later", *common), world)
    take_step = trainer._step

    def spoil_after_step_2() -> Any:
        result = take_step()
        if trainer.state.step == 2:
            with torch.no_grad():
                trainer.model.norm.weight.mul_(float("inf"))
        return result

    trainer._step = spoil_after_step_2  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match=r"after step 2 the weights norm\.weight are not finite"):
        trainer.fit()
    checkpoint = latest_checkpoint(trainer.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == "step_00000001"


def test_a_batch_without_labels_is_refused() -> None:
    batch = batches(1, sequences=2)[0]
    guard = StepGuard()
    guard.watch(1, step(build(), [batch._replace(labels_BS=torch.full_like(batch.labels_BS, -100))]))
    with pytest.raises(FloatingPointError, match="over 0 valid tokens"):
        guard.settle()


def without_labels(micro: MicroBatch) -> MicroBatch:
    labels_BS = torch.full_like(micro.batch.labels_BS, -100)
    return MicroBatch(micro.batch._replace(labels_BS=labels_BS), micro.first_sample)


@pytest.mark.parametrize("precision", Precision)
def test_a_run_stops_at_a_gradient_that_is_not_finite_and_saves_nothing_after_it(
    small_run: Callable[..., RunConfig], precision: Precision, world: World
) -> None:
    config = small_run(f"train.precision={precision.name}", "checkpoint.every_steps=1", "logging.every_steps=100")
    trainer = Trainer(config, world)
    deal = trainer._micro_batches

    def spoiled() -> Any:
        for number, micro in enumerate(deal):
            yield without_labels(micro) if number // 2 == 3 else micro

    trainer._micro_batches = spoiled()
    with pytest.raises(FloatingPointError, match=r"in step 4 .* over 0 valid tokens"):
        trainer.fit()
    checkpoint = latest_checkpoint(trainer.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == "step_00000003"
