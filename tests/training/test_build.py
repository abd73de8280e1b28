"""What a run is told about what computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import training.build
from model.attend import AttentionKernel
from training.build import choose_kernels
from training.config import RunConfig
from training.world import World


def take_flex(*_: Any, **__: Any) -> AttentionKernel:
    return AttentionKernel.flex  # as on a GPU


@pytest.mark.parametrize(
    ("compiles", "mode", "warns"), [("false", "selective", 1), ("true", "selective", 0), ("false", "none", 0)]
)
def test_attention_that_makes_all_scores_is_told(
    small_run: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiles: str,
    mode: str,
    warns: int,
) -> None:
    monkeypatch.setattr(training.build, "choose_attention", take_flex)
    knobs = (f"parallel.compile={compiles}", f"parallel.activation_checkpointing={mode}")
    choose_kernels(small_run("kernels=portable", *knobs), World(rank=0, size=1, device=torch.device("cpu")))
    assert caplog.text.count("kernels.attention=sdpa") == warns
