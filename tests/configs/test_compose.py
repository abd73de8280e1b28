"""Every YAML file composes into a RunConfig, and what cannot work stops with the name of the knob."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_kernels import Rounding, RoutingKind
from training.config import RunConfig, register_schemas

CONFIGS = Path(__file__).parents[2] / "configs"
GROUPS = (
    "model",
    "data",
    "optim",
    "kernels",
    "parallel",
    "logging",
    "experiment",
    "debug",
    "routing@model.moe.routing",
)
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group.split("@")[0]).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    register_schemas()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def run_config(*overrides: str) -> RunConfig:
    config = OmegaConf.to_object(compose("train", overrides=list(overrides)))
    assert isinstance(config, RunConfig)
    return config


def test_every_group_has_a_choice() -> None:
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group: str, choice: str) -> None:
    # A big model needs more tokens in a micro-batch than the demo has; the refusal has a test of its own below.
    run_config(f"{group}={choice}", "model.moe.routing.allow_below_one_tile=true")


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiment_opens_with_the_question_it_asks(path: Path) -> None:
    package, question = path.read_text(encoding="utf-8").splitlines()[:2]
    assert package == "# @package _global_"
    assert question.startswith("# ")
    assert question.endswith("?")


def test_experiments_change_what_they_say() -> None:
    assert run_config().model.moe.routing.train is RoutingKind.token_rounding
    assert run_config("experiment=train_top_k").model.moe.routing.train is RoutingKind.top_k
    assert run_config("experiment=round_up").model.moe.routing.rounding is Rounding.up
    assert run_config("experiment=round_down").model.moe.routing.rounding is Rounding.down
    names = [run_config(f"experiment={name}").run.name for name in ("train_top_k", "round_up", "round_down")]
    assert len({run_config().run.name, *names}) == 4


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.moe.num_expert=64", "num_expert"),
        ("optimm.lr=1", "optimm"),
        ("kernels.backend=cuda", "auto, reference, portable"),
        ("model.moe.routing.rounding=closest", "nearest, stochastic"),
        ("train.num_steps=many", "many"),
        ("experiment=no_such_question", "train_top_k"),
    ],
)
def test_misspelt_key_or_choice_stops_and_names_it(override: str, named: str) -> None:
    with pytest.raises((ConfigCompositionException, OmegaConfBaseException)) as caught:
        run_config(override)
    messages = f"{caught.value} {caught.value.__cause__}"
    assert named in messages


@pytest.mark.parametrize(
    ("overrides", "knobs"),
    [
        (["model.moe.experts_per_token=100"], ["model.moe.experts_per_token", "model.moe.num_experts"]),
        (["model.moe.routing.tile_m=4096"], ["tile_m", "train.micro_batch_sequences"]),
        (
            ["train.micro_batch_sequences=1"],
            ["train.micro_batch_sequences", "experts_per_token", "num_experts", "tile_m", "allow_below_one_tile"],
        ),
        (["train.global_batch_sequences=6"], ["train.global_batch_sequences", "train.micro_batch_sequences"]),
        (["data.sequence_length=1024"], ["data.sequence_length", "model.max_positions"]),
        (["model.moe.routing.evaluation=token_rounding"], ["model.moe.routing.evaluation"]),
        (["model.moe.experts_per_token=1", "model.moe.normalize_top_k=true"], ["normalize_top_k"]),
        (["optim.lr=-1"], ["optim.lr"]),
        (["optim.lr=nan"], ["optim.lr"]),
        (["train.router_z_weight=inf"], ["train.router_z_weight"]),
        (["optim.betas=[0.9]"], ["optim.betas"]),
        (["optim.warmup_fraction=2"], ["optim.warmup_fraction"]),
        (["optim=adamw_wsd", "optim.warmup_fraction=0.9"], ["optim.warmup_fraction", "optim.decay_fraction"]),
        (["train.batch_ramp=[{until_step: 5, sequences: 6}]"], ["train.batch_ramp[0].sequences=6"]),
        (["train.batch_ramp=[{until_step: 5, sequences: 4}, {until_step: 5, sequences: 4}]"], ["train.batch_ramp"]),
        (["parallel.shard_degree=0"], ["parallel.shard_degree"]),
        (["parallel.prefetch_blocks=-1"], ["parallel.prefetch_blocks"]),
        (["profiler.num_steps=0"], ["profiler.num_steps"]),
        (["profiler.skip_steps=-1"], ["profiler.skip_steps"]),
        (["profile=true", "evaluation.every_steps=5"], ["evaluation.every_steps=5", "profiler.num_steps=3"]),
        (["profile=true", "checkpoint.every_steps=5"], ["checkpoint.every_steps=5", "profiler.num_steps=3"]),
        (["train.num_threads=100000"], ["train.num_threads"]),
        (["train.seed=-1"], ["train.seed"]),
        (["train.num_steps=0"], ["train.num_steps"]),
        (["run.name=a/b"], ["run.name"]),
        (["run.stop_at_step=0"], ["run.stop_at_step"]),
        (["checkpoint.keep=0"], ["checkpoint.keep"]),
        (["logging.every_steps=0"], ["logging.every_steps"]),
        (["train.max_grad_norm=0"], ["train.max_grad_norm"]),
    ],
)
def test_what_cannot_work_stops_and_names_the_knob(overrides: list[str], knobs: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each knob is matched below
        run_config(*overrides)
    for knob in knobs:
        assert knob in str(caught.value)


def test_profile_is_a_switch_with_knobs_beside_it() -> None:
    assert run_config().profile is False
    config = run_config("profile=true", "profiler.num_steps=5")
    assert config.profile is True
    assert config.profiler.num_steps == 5


@pytest.mark.parametrize(("value", "expected"), [("null", None), ("true", True), ("false", False)])
def test_blocks_are_compiled_always_never_or_as_the_device_suggests(value: str, expected: bool | None) -> None:
    assert run_config(f"parallel.compile={value}").parallel.compile is expected
    assert run_config().parallel.compile is None


def leaf_keys(config: Any) -> Iterator[str]:
    for key in fields(config):
        value = getattr(config, key.name)
        if is_dataclass(value):
            yield from leaf_keys(value)
        else:
            yield key.name


def test_every_key_is_read_outside_of_the_dataclass_that_holds_it() -> None:
    schemas = {"config", "config.py"}
    folders = ("checkpoint", "data", "evaluation", "model", "moe_kernels", "training")
    paths = [path for folder in folders for path in (CONFIGS.parent / folder).rglob("*.py")]
    readers = [path.read_text(encoding="utf-8") for path in paths if not schemas & {path.name, path.parent.name}]
    # What the whole configuration itself combines from its sections counts as read.
    readers.append((CONFIGS.parent / "training" / "config" / "run.py").read_text(encoding="utf-8"))
    read = set(re.findall(r"\.(\w+)", "\n".join(readers)))
    through_methods = {"global_batch_sequences", "batch_ramp"}  # TrainConfig.batch_sizes and sequences_at
    assert {key for key in leaf_keys(run_config()) if key not in read} == through_methods


def test_fewer_than_two_tiles_an_expert_warns_and_names_every_knob() -> None:
    assert run_config().warnings() == []
    config = run_config(
        "model.moe.routing.tile_m=128", "train.micro_batch_sequences=6", "train.global_batch_sequences=6"
    )
    (warning,) = config.warnings()
    assert config.tiles_per_expert < 2
    for knob in ("train.micro_batch_sequences=6", "experts_per_token", "num_experts", "tile_m=128"):
        assert knob in warning


def test_sparse_tiles_train_when_told() -> None:
    config = run_config(
        "train.micro_batch_sequences=1",
        "train.global_batch_sequences=1",
        "model.moe.routing.allow_below_one_tile=true",
    )
    assert config.tiles_per_expert < 1
