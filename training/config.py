"""The configuration of a run: every dataclass composed, and the checks that need more than one of them.

Values live in configs/ (YAML), types beside their owners, and nothing changes a config after it is built.
Checks that need the prepared data are in training/run_folder.py.
"""

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import inf

from hydra.core.config_store import ConfigStore

from data.config import DataConfig
from model.config import ModelConfig
from moe_kernels import BackendName, RoutingKind


class DeviceName(Enum):
    """Where the run computes."""

    auto = "auto"  # cuda if torch finds a device, else cpu
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    """Whether Weights & Biases gets the metrics; metrics.jsonl gets them always."""

    off = "off"  # the package is not imported
    auto = "auto"  # online where an API key is configured, offline otherwise
    offline = "offline"
    online = "online"


class BalanceScope(Enum):
    """Over which tokens the load-balancing loss asks for balance; 1 is balanced in each."""

    micro_batch = "micro_batch"  # every forward by itself
    sequence = "sequence"  # every sequence by itself, the strictest
    global_step = "global_step"  # against the load of the whole step before; the first step against its own


class Precision(Enum):
    """What blocks compute in; parameters, their gradients' sums and the optimiser are fp32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


class Schedule(Enum):
    """How the learning rate falls after the warm-up."""

    cosine = "cosine"  # along half a cosine to the end
    wsd = "wsd"  # constant, then linearly down over the last optim.decay_fraction of the run


class OptimizerStates(Enum):
    """What AdamW keeps its two moments in."""

    fp32 = "fp32"
    int8 = "int8"  # blocks of 256 share a scale; torchao's AdamW8bit, so the extra 'lowbit' has to be installed


class ActivationCheckpointing(Enum):
    """What a block recomputes in the backward instead of keeping it."""

    none = "none"
    selective = "selective"  # everything but attention and the MoE op
    full = "full"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How processes share the model. Changes memory and speed, not what is computed; may change on resume."""

    shard_degree: int | None = None  # processes that hold one copy of the model between them; null: all of them
    reshard_after_forward: bool = True  # free a block's gathered parameters until its backward
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    compile: bool = False  # torch.compile for every block

    def __post_init__(self) -> None:
        if self.shard_degree is not None and self.shard_degree < 1:
            raise ValueError(f"parallel.shard_degree={self.shard_degree} must be at least 1 (or null for all)")


@dataclass(kw_only=True, slots=True)
class RunSection:
    """Where the run lives and how far this process takes it. May differ between the processes of one run."""

    name: str = "tiny"
    root: str = "runs"  # the run folder is <root>/<name>
    device: DeviceName = DeviceName.auto
    stop_at_step: int | None = None  # save and stop there; the schedule still ends at train.num_steps

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or any(letter in self.name for letter in "/\\\0"):
            raise ValueError(f"run.name={self.name!r} must be the name of one folder, without slashes")
        if self.stop_at_step is not None and self.stop_at_step < 1:
            raise ValueError(f"run.stop_at_step={self.stop_at_step} must be at least 1 (or null to run to the end)")


@dataclass(kw_only=True, slots=True)
class RampStage:
    """A smaller global batch for the steps before ``until_step``."""

    until_step: int
    sequences: int


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How many tokens a step sees, how many steps there are, and what is minimised."""

    num_steps: int
    micro_batch_sequences: int  # sequences in one forward; token rounding happens within it, so it is part of the maths
    global_batch_sequences: int  # sequences in one optimiser step, once any ramp is over
    batch_ramp: list[RampStage] = field(default_factory=list)  # smaller batches first; the learning rate ignores it
    load_balance_weight: float = 0.01  # on a loss that is 1 when balanced; HF's coefficient = this / experts_per_token
    balance_scope: BalanceScope = BalanceScope.micro_batch
    router_z_weight: float = 0.001
    expert_bias_rate: float = 0.001  # step of the balancing bias after each optimiser step; sigmoid router only
    max_grad_norm: float = 1.0
    init_from: str | None = None  # run folder, imported ones too, whose weights a new run starts from
    precision: Precision = Precision.fp32
    seed: int = 0  # of the initial weights and of stochastic rounding; the order of the data has data.order_seed
    num_threads: int = 2  # of torch on the CPU; part of the run because sums depend on it

    def __post_init__(self) -> None:
        for name in ("num_steps", "micro_batch_sequences", "global_batch_sequences", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**16:
            raise ValueError(f"train.seed={self.seed} must lie between 0 and 65535")
        for name in ("load_balance_weight", "router_z_weight", "expert_bias_rate"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"train.{name}={getattr(self, name)} must be a number from 0 on")
        if not self.max_grad_norm > 0:
            raise ValueError(
                f"train.max_grad_norm={self.max_grad_norm} must be positive (use a large value not to clip)"
            )
        for name, sequences in self.batch_sizes().items():
            if sequences < 1 or sequences % self.micro_batch_sequences != 0:
                raise ValueError(
                    f"{name}={sequences} must be a multiple of train.micro_batch_sequences={self.micro_batch_sequences}"
                )
        ends = [stage.until_step for stage in self.batch_ramp]
        if any(later <= earlier for earlier, later in pairwise([0, *ends])):
            raise ValueError(f"train.batch_ramp ends its stages at steps {ends}, which must rise from 1 on")

    def batch_sizes(self) -> dict[str, int]:
        """Return every global batch of the run, in sequences, by the key that sets it."""
        ramp = {f"train.batch_ramp[{i}].sequences": stage.sequences for i, stage in enumerate(self.batch_ramp)}
        return ramp | {"train.global_batch_sequences": self.global_batch_sequences}

    def sequences_at(self, step: int) -> int:
        """Return the sequences of optimiser step ``step`` (from 0)."""
        stages = (stage.sequences for stage in self.batch_ramp if step < stage.until_step)
        return next(stages, self.global_batch_sequences)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW, and a schedule after a linear warm-up."""

    lr: float
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices; norms and biases have none
    states: OptimizerStates = OptimizerStates.fp32
    decay_embeddings: bool = True  # whether the embedding and the head decay as other matrices do
    schedule: Schedule = Schedule.cosine
    warmup_fraction: float = 0.05  # of train.num_steps
    decay_fraction: float = 0.2  # of train.num_steps; read by wsd only
    final_lr_fraction: float = 0.1  # of lr, reached at train.num_steps

    def __post_init__(self) -> None:
        if not (0 < self.lr < inf and 0 < self.eps < inf):
            raise ValueError(f"optim.lr={self.lr} and optim.eps={self.eps} must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers from 0 up to but not including 1")
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"optim.weight_decay={self.weight_decay} must be a number from 0 on")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name}={getattr(self, name)} must lie between 0 and 1")
        if self.schedule is Schedule.wsd and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"optim.warmup_fraction={self.warmup_fraction} and optim.decay_fraction={self.decay_fraction} exceed "
                "the run together"
            )


@dataclass(kw_only=True, slots=True)
class KernelsConfig:
    """Which backend computes the experts."""

    backend: BackendName = BackendName.auto


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out loss during training."""

    every_steps: int = 200  # and always after the last step; 0: only then
    max_sequences: int | None = None  # rows of the held-out split to read, in whole micro-batches; null: all

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"evaluation.every_steps={self.every_steps} must not be negative")
        if self.max_sequences is not None and self.max_sequences < 1:
            raise ValueError(f"evaluation.max_sequences={self.max_sequences} must be at least 1 (or null for all)")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, besides at the end and when told to stop."""

    every_steps: int = 200  # 0: only at the end and when told to stop
    keep: int = 2  # newest complete checkpoints that stay on disk

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"checkpoint.every_steps={self.every_steps} must not be negative")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep={self.keep} must be at least 1")


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Where metrics go, and how often."""

    every_steps: int = 10
    wandb: WandbMode = WandbMode.auto
    wandb_project: str = "gristmill"

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"logging.every_steps={self.every_steps} must be at least 1")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run. run, parallel, logging, evaluation and checkpoint may change on resume."""

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

    def __post_init__(self) -> None:
        if self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} exceeds "
                f"model.max_positions={self.model.max_positions}"
            )
        self._check_tiles()

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


def register_schemas() -> None:
    """Give Hydra the schema that configs/train.yaml composes over."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
