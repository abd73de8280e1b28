"""What tests of more than one folder share: real text prepared once, and configurations of very small runs."""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from data.prepare import main as prepare
from training.config import DeviceName, RunConfig, register_schemas
from training.world import World, open_world

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton's kernels are interpreted if this stands before they are defined

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "data" / "text" / "state_of_the_union.jsonl.gz"

# One layer that is as small as a mixture of experts can be and still has every part; 512 tokens a micro-batch.
SMALL = (
    "debug=cpu_smoke",
    "model.vocab_size=512",
    "model.width=32",
    "model.num_layers=2",
    "model.attention.num_heads=2",
    "model.attention.num_kv_heads=2",
    "model.attention.head_width=16",
    "model.moe.num_experts=8",
    "model.moe.experts_per_token=2",
    "model.moe.expert_width=16",
    "model.moe.routing.tile_m=32",
    "data.sequence_length=64",
    "train.micro_batch_sequences=8",
    "train.global_batch_sequences=16",
    "train.num_threads=1",
)


@pytest.fixture
def triton_device() -> torch.device:
    """The device that runs Triton's kernels: a GPU, or a CPU with their interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    major, minor, *_ = numpy.__version__.split(".")
    if (int(major), int(minor)) >= (2, 4):
        pytest.skip("triton 3.6's interpreter reads loop bounds in a way that numpy 2.4 refuses")
    return torch.device("cpu")


@pytest.fixture
def sharded_world() -> Iterator[World]:
    """This process alone in a group of its own: what is sharded is sharded over it."""
    world = open_world(DeviceName.auto)
    yield world
    world.close()


@pytest.fixture
def small_parts_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parallel.gather_in_place take parameters of any size."""
    monkeypatch.setattr("training.parallel.LARGE_PART", 1)


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with 512 tokens of vocabulary, from the first addresses of the bundled text."""
    folder = tmp_path_factory.mktemp("prepared")
    with gzip.open(TEXT, "rt", encoding="utf-8") as lines:
        addresses = [json.loads(line) for line in lines][:24]
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": address["text"][:8000]}) for address in addresses), encoding="utf-8")
    root = folder / "root"
    prepare(["--text", str(text), "--out", str(root), "--vocab-size", "512", "--held-out-fraction", "0.2"])
    return root


@pytest.fixture
def small_run(prepared_root: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A function from Hydra overrides to the configuration of a very small run in a folder of the test's own."""

    def build(*overrides: str) -> RunConfig:
        GlobalHydra.instance().clear()
        register_schemas()
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            places = (f"data.root={prepared_root}", f"run.root={tmp_path / 'runs'}")
            config = OmegaConf.to_object(compose("train", overrides=[*SMALL, *places, *overrides]))
        assert isinstance(config, RunConfig)
        return config

    return build
