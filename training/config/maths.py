"""What a run computes: steps, batches, losses and the optimiser. Where and how fast it does is machine.py."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import inf

# More than any machine has; with far more, torch ends the process.
MAX_THREADS = 1024


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
        if self.num_threads > MAX_THREADS:
            raise ValueError(f"train.num_threads={self.num_threads} must be at most {MAX_THREADS}")
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
