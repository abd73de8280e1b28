"""The garbage collector looks away while steps run, and no longer."""

import gc
from collections.abc import Callable

import pytest
import torch

import training.trainer
from training.config import RunConfig
from training.environment import hide_objects, objects_seen_again
from training.trainer import Trainer
from training.world import World


def test_hidden_objects_are_seen_again_at_the_end_of_the_block() -> None:
    before, mine = gc.get_freeze_count(), [[]]
    with objects_seen_again():
        hide_objects()
        assert gc.get_freeze_count() > before + 1000
        assert not any(each is mine for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(each is mine for each in gc.get_objects())


def test_a_run_hides_objects_once_after_its_first_step(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, counts = small_run("run.stop_at_step=3"), []
    trainer = Trainer(config, World(rank=0, size=1, device=torch.device("cpu")))
    monkeypatch.setattr(training.trainer, "hide_objects", lambda: counts.append(trainer.state.step) or hide_objects())
    trainer.fit()
    assert counts == [1]
    assert gc.get_freeze_count() == 0
