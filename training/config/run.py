"""The whole configuration of a run: its sections, and the checks that need more than one of them.

Checks that need the prepared data are in training/run_folder.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore

from data.config import DataConfig
from model.config import ModelConfig
from moe_kernels import RoutingKind
from training.config.machine import (
    CheckpointConfig,
    EvaluationConfig,
    KernelsConfig,
    LoggingConfig,
    ParallelConfig,
    ProfilerConfig,
    RunSection,
)
from training.config.maths import OptimConfig, TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run; what may change on resume is FREE_SECTIONS of training/run_folder.py."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunSection = field(default_factory=RunSection)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: bool = False  # a trace, a memory snapshot and a table of where the time of a few steps goes
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        if self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} exceeds "
                f"model.max_positions={self.model.max_positions}"
            )
        self._check_tiles()
        self._check_profile()

    @property
    def records_steps(self) -> bool:
        """Whether steps become a CUDA graph; one that is profiled does not, which would have no operators to name."""
        return self.parallel.cuda_graph and not self.profile

    @property
    def micro_batch_tokens(self) -> int:
        """T, the tokens in one forward: micro-batch sequences × sequence length."""
        return self.train.micro_batch_sequences * self.data.sequence_length

    @property
    def tiles_per_expert(self) -> float:
        """Mean tokens of an expert in a micro-batch, T·K/E, in tiles of ``routing.tile_m`` rows."""
        moe = self.model.moe
        return self.micro_batch_tokens * moe.experts_per_token / moe.num_experts / moe.routing.tile_m

    def _check_tiles(self) -> None:
        routing = self.model.moe.routing
        if routing.train is not RoutingKind.token_rounding:
            return
        if routing.tile_m > self.micro_batch_tokens:
            raise ValueError(
                f"model.moe.routing.tile_m={routing.tile_m} exceeds the {self.micro_batch_tokens} tokens of a "
                f"micro-batch: {self.describe_tiles()}. No expert could keep a single token"
            )
        if self.tiles_per_expert < 1 and not routing.allow_below_one_tile:
            raise ValueError(
                f"an expert gets {self.tiles_per_expert:.2f} tiles of tokens on average, so token rounding would "
                f"change most of the routing: {self.describe_tiles()}. Raise the micro-batch, lower tile_m, or set "
                "model.moe.routing.allow_below_one_tile=true"
            )

    def _check_profile(self) -> None:
        needed = self.profiler.num_in_a_row
        for name, every in (
            ("evaluation.every_steps", self.evaluation.every_steps),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
        ):
            # One more: what comes after the last step before them would be recorded too.
            if self.profile and 0 < every <= needed:
                raise ValueError(
                    f"profile=true needs {needed} steps in a row without an evaluation or a save between them, so "
                    f"{name}={every} must be at least {needed + 1} (or 0), or profiler.num_steps="
                    f"{self.profiler.num_steps} lower"
                )

    def describe_tiles(self) -> str:
        """Name every knob that decides how many tiles of tokens an expert gets."""
        moe = self.model.moe
        return (
            f"train.micro_batch_sequences={self.train.micro_batch_sequences} × "
            f"data.sequence_length={self.data.sequence_length} tokens, "
            f"model.moe.experts_per_token={moe.experts_per_token} of model.moe.num_experts={moe.num_experts}, "
            f"model.moe.routing.tile_m={moe.routing.tile_m}"
        )

    def warnings(self) -> list[str]:
        """List what is allowed but rarely meant."""
        few_tiles = self.model.moe.routing.train is RoutingKind.token_rounding and self.tiles_per_expert < 2
        if not few_tiles:
            return []
        return [
            f"an expert gets {self.tiles_per_expert:.2f} tiles of tokens on average; below 2, token rounding costs "
            f"quality (SonicMoE, table 7): {self.describe_tiles()}"
        ]


def check_choices(overrides: Sequence[str]) -> None:
    """Raise ValueError if one of Hydra's ``overrides`` chooses nothing from a folder of configs/.

    Hydra would end in a trace that does not say which.
    """
    for override in overrides:
        key, is_set, value = override.partition("=")
        folder = CONFIGS / key.lstrip("+~").partition("@")[0]
        if is_set and value in {"", "null"} and key and folder.is_dir():
            choices = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            raise ValueError(
                f"{override} chooses no file of configs/{folder.name}/ ({choices}): name one, or leave it out"
            )


def register_schemas() -> None:
    """Give Hydra the schema that configs/train.yaml composes over."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
