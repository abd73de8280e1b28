"""Where a run computes, on how many processes, and what it reports, saves and profiles.

Nothing here but ``kernels`` changes what is computed (maths.py), so the rest may differ between the processes of a run.
"""

from dataclasses import dataclass
from enum import Enum

from model.attend import AttentionKernel
from moe_kernels import BackendName


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


class ActivationCheckpointing(Enum):
    """What a block recomputes in the backward instead of keeping it."""

    none = "none"
    elementwise = "elementwise"  # norms, rotations and sums; not matrix products, attention and the MoE op
    selective = "selective"  # those, and of a block's matrix products every second one: attention's projection
    full = "full"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How processes share the model. Changes memory and speed, not what is computed; may change on resume."""

    shard_degree: int | None = None  # processes that hold one copy of the model between them; null: all of them
    reshard_after_forward: bool = True  # free a block's gathered parameters until its backward
    blocks_per_unit: int = 1  # gathered and summed together: fewer and larger messages, less for the host to do
    prefetch_blocks: int = 0  # blocks gathered ahead of the one at work; 0: as FSDP does by itself, one as time allows
    sum_every_micro_batch: bool = False  # sum gradients over processes after each: no unsharded sums, more traffic
    exchange_gradients: bool = False  # send gradients as computed, sum in fp32 on arrival; for processes of one host
    peer_copies: bool = False  # GPUs of one host read each other's memory in place of NCCL; gradients are exchanged
    gather_in_place: bool = False  # large parameters keep the memory they are gathered in; none is copied once more
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    recompute_h: bool = False  # of the experts: their up-projection runs again in the backward and h is not kept
    compile: bool | None = None  # torch.compile for every block, whole; null: on CUDA devices
    cuda_graph: bool = False  # forwards and backwards of a step are launched as one: the host no longer limits them

    def __post_init__(self) -> None:
        if self.shard_degree is not None and self.shard_degree < 1:
            raise ValueError(f"parallel.shard_degree={self.shard_degree} must be at least 1 (or null for all)")
        if self.blocks_per_unit < 1:
            raise ValueError(f"parallel.blocks_per_unit={self.blocks_per_unit} must be at least 1")
        if self.prefetch_blocks < 0:
            raise ValueError(f"parallel.prefetch_blocks={self.prefetch_blocks} must not be negative")
        if self.gather_in_place and self.reshard_after_forward:
            raise ValueError(
                "parallel.gather_in_place=true keeps the memory of gathered parameters, which "
                "parallel.reshard_after_forward=true would free: set one of the two to false"
            )


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
class KernelsConfig:
    """What computes the experts and the attention. Chosen once, when the model is built, and said in the log."""

    backend: BackendName = BackendName.auto
    attention: AttentionKernel = AttentionKernel.auto


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
class ProfilerConfig:
    """Which steps are looked at with ``profile=true``; what is written goes to the run folder's ``profile/``."""

    skip_steps: int = 10  # of this process before, at least: they compile and warm up
    num_steps: int = 3
    memory: bool = True  # a snapshot of the CUDA allocator too, of one step more, for pytorch.org/memory_viz

    @property
    def num_in_a_row(self) -> int:
        """Steps that nothing may come between: one to warm up in, those looked at, and the one of the memory."""
        return 1 + self.num_steps + self.memory

    def __post_init__(self) -> None:
        for name, least in (("skip_steps", 0), ("num_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"profiler.{name}={getattr(self, name)} must be at least {least}")
