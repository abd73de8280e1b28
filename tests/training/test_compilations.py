"""What torch.compile needs is looked for before a run starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.config import RunConfig
from training.trainer import Trainer
from training.world import World


def refused(config: RunConfig) -> str:
    with pytest.raises(ValueError, match=r"parallel\.compile=false") as caught:
        Trainer(config, World(rank=0, size=1, device=torch.device("cpu")))
    assert not Path(config.run.root).exists()
    return str(caught.value)


def test_compiling_without_a_compiler_is_refused(small_run: Callable[..., RunConfig]) -> None:
    from torch._inductor import config as inductor

    with inductor.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        assert "C++ compiler" in refused(small_run("parallel.compile=true"))


def test_compiling_without_a_place_for_it_is_refused(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert f"TORCHINDUCTOR_CACHE_DIR, which is {tmp_path / 'file' / 'cache'}," in refused(
        small_run("parallel.compile=true")
    )
