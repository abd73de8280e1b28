"""Parameters gathered where they are used are those that FSDP copies there, and need no second place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.test_step_graph import assert_equal, train
from training.config import ParallelConfig, RunConfig
from training.gather import Gather
from training.trainer import EXIT_DONE, Trainer
from training.world import World

OPTIONS = (
    *("run.device=cpu", "kernels=portable", "train.precision=bf16", "parallel.reshard_after_forward=false"),
    *("logging.every_steps=1", "evaluation.every_steps=3", "checkpoint.every_steps=0", "train.num_steps=9"),
    "train.global_batch_sequences=16",  # two micro-batches a step: gathered twice
)


def gathers_of(trainer: Trainer) -> list[Gather]:
    parts = [parameter._local_tensor for parameter in trainer.model.parameters()]  # type: ignore[attr-defined]
    return [part.fsdp_pre_all_gather.__self__._gather for part in parts]


@pytest.mark.usefixtures("small_parts_in_place")
def test_a_run_is_the_same_and_goes_on_from_its_checkpoint(
    small_run: Callable[..., RunConfig], sharded_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(small_run("run.name=plain", *OPTIONS), sharded_world, lambda trainer: None)
    filled: list[int] = []
    trainers: list[Trainer] = []
    fill = Gather.fill

    def count(gather: Gather, whole_X: Tensor, part_X: Tensor) -> None:
        filled.append(whole_X.data_ptr())
        fill(gather, whole_X, part_X)

    monkeypatch.setattr(Gather, "fill", count)
    options = (*OPTIONS, "run.name=in_place", "parallel.gather_in_place=true")
    assert Trainer(small_run(*options, "run.stop_at_step=5"), sharded_world).fit() == EXIT_DONE
    num_parameters = len(plain["parameters"])
    assert len(set(filled)) == num_parameters
    assert len(filled) >= 10 * num_parameters
    rest = train(small_run(*options), sharded_world, trainers.append)
    (gather,) = {id(owner): owner for trainer in trainers for owner in gathers_of(trainer)}.values()
    assert gather._waiting == []  # there are no others to wait for
    # The last step before the stop, and its evaluation, are in one run alone.
    lines = [line for line in plain["lines"] if line["progress/step"] > 5]
    rest["lines"] = [line for line in rest["lines"] if line["progress/step"] > 5 and "progress/resumed" not in line]
    assert_equal(rest, plain | {"lines": lines}, least=5)


@pytest.mark.usefixtures("small_parts_in_place")
def test_the_forwards_parameter_is_the_memory_that_was_gathered(
    small_run: Callable[..., RunConfig], sharded_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes: list[tuple[int, int]] = []
    whole = Gather.whole

    def note(gather: Gather, num: int, device: torch.device) -> Tensor:
        memory = whole(gather, num, device)
        wholes.append((memory.numel(), memory.data_ptr()))
        return memory

    monkeypatch.setattr(Gather, "whole", note)
    trainer = Trainer(small_run(*OPTIONS, "parallel.gather_in_place=true"), sharded_world)
    used: list[tuple[int, int]] = []

    def look(module: Any, arguments: Any) -> None:
        used.extend((parameter.numel(), parameter.data_ptr()) for parameter in module.parameters(recurse=False))

    for module in trainer.model.modules():
        module.register_forward_pre_hook(look)
    assert trainer.fit() == EXIT_DONE
    in_forwards = set(used) & set(wholes)
    assert len(wholes) == len(list(trainer.model.parameters()))
    assert len(in_forwards) > len(wholes) // 2  # of the modules that are called as such


def test_memory_that_would_be_freed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.gather_in_place=true .*parallel\.reshard_after_forward=true"):
        ParallelConfig(gather_in_place=True)
