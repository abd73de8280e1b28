"""The check of preflight's predictions says what it needs."""

import pytest
import torch

from benchmarks.preflight_check import main


def test_without_a_gpu_it_ends_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^error: torch finds no CUDA device.*launch\.preflight"):
        main([])
