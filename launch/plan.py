"""The plan of a run as one object: memory and its alternatives, tokens, disk and days. Printed by report.py."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from launch.activations import Sizes, block_memory, sizes_of
from launch.layout import Layout, layout_of
from launch.memory import StepMoment, moments_bytes, peak, step_moments
from model.counting import ParameterCount, count_parameters
from training.build import Kernels
from training.config import ActivationCheckpointing, RunConfig

_FP32, _BF16 = 4, 2
_SECONDS_PER_DAY = 86_400


class Throughput(NamedTuple):
    """Tokens per second and GPU of a benchmark, and a note that says which of its rows that is."""

    tokens_per_s_per_gpu: float
    note: str


class ThroughputError(ValueError):
    """A benchmark's JSON has no throughput for the run."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What the same run would need with another choice of what is recomputed."""

    checkpointing: ActivationCheckpointing
    recompute_h: bool
    is_chosen: bool
    kept_per_block: int  # bytes, mean over the blocks
    peak: int


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """The busiest expert of a layer, and what a layer allocates for all of them."""

    name: str
    busiest: int  # tokens of the busiest expert, before rounding
    rows: int  # allocated: the most that the routing can use
    peak: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs. Bytes are those of one GPU unless said."""

    name: str
    config: RunConfig
    count: ParameterCount
    gpus: int
    layout: Layout
    sizes: Sizes
    moments: list[StepMoment]
    alternatives: list[Alternative]
    peak_if_summed: int | None  # with parallel.sum_every_micro_batch, where gradients wait to be summed and it is less
    imbalances: list[Imbalance]
    gpu_bytes: int
    context_bytes: int  # assumed
    fragmentation: float  # assumed, of the peak
    num_micro_batches: int  # of one process in a step
    tokens: float
    tokens_per_s_per_gpu: float | None

    @property
    def peak(self) -> StepMoment:
        """The moment of a step at which most is needed."""
        return peak(self.moments)

    @property
    def needed(self) -> int:
        """The peak with the assumed allowances."""
        return self.with_allowances(self.peak.parts.total)

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.needed <= self.gpu_bytes

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimiser step over all processes, once any ramp is over."""
        return self.config.train.global_batch_sequences * self.config.data.sequence_length

    @property
    def days(self) -> float | None:
        """Days for the budget at the throughput, evaluation and saves not counted; None without a throughput."""
        if self.tokens_per_s_per_gpu is None:
            return None
        return self.tokens / (self.tokens_per_s_per_gpu * self.gpus) / _SECONDS_PER_DAY

    def with_allowances(self, allocated: int) -> int:
        """Return what a device has to hold where torch has ``allocated``."""
        return int(allocated * (1 + self.fragmentation)) + self.context_bytes

    def checkpoint_bytes(self) -> dict[str, int]:
        """Return the bytes on disk of what the run writes, all processes together; metadata is small beside them."""
        total = self.count.total
        weights, moments = _FP32 * total, moments_bytes(total, self.config.optim.states)
        one = weights + moments
        return {
            "one checkpoint": one,
            # The new one is whole before the oldest goes.
            f"the run (checkpoint.keep={self.config.checkpoint.keep}, and one being written)": one
            * (self.config.checkpoint.keep + 1),
            "an export to Hugging Face, float32": weights,
            "an export to Hugging Face, bfloat16": _BF16 * total,
        }


def make_plan(
    config: RunConfig,
    kernels: Kernels,
    *,
    name: str,
    gpus: int,
    gpu_bytes: int,
    context_bytes: int,
    fragmentation: float,
    tokens: float | None,
    tokens_per_s_per_gpu: float | None,
) -> Plan:
    """Return the plan of a run on GPUs, which ``launch.preflight`` has checked, with these kernels."""
    # parallel.compile=null compiles on CUDA devices.
    sizes = sizes_of(config, kernels, is_compiled=config.parallel.compile is not False)
    layout = layout_of(config, gpus=gpus)
    num_micro_batches = config.train.global_batch_sequences // config.train.micro_batch_sequences // gpus

    def moments_of(sizes: Sizes, config: RunConfig = config) -> list[StepMoment]:
        return step_moments(config, sizes, layout, num_micro_batches=num_micro_batches)

    moments = moments_of(sizes)
    peak_bytes = peak(moments).parts.total
    peak_if_summed = None
    if any(moment.parts.unsummed for moment in moments):
        summed = replace(config, parallel=replace(config.parallel, sum_every_micro_batch=True))
        if_summed = peak(moments_of(sizes, summed)).parts.total
        peak_if_summed = if_summed if if_summed < peak_bytes else None
    alternatives = []
    for checkpointing, recompute_h in product(ActivationCheckpointing, (False, True)):
        other = replace(sizes, checkpointing=checkpointing, recompute_h=recompute_h)
        num_layers = config.model.num_layers
        alternatives.append(
            Alternative(
                checkpointing=checkpointing,
                recompute_h=recompute_h,
                is_chosen=other == sizes,
                kept_per_block=sum(block_memory(other, layer).kept for layer in range(num_layers)) // num_layers,
                peak=peak(moments_of(other)).parts.total,
            )
        )
    return Plan(
        name=name,
        config=config,
        count=count_parameters(config.model),
        gpus=gpus,
        layout=layout,
        sizes=sizes,
        moments=moments,
        alternatives=alternatives,
        peak_if_summed=peak_if_summed,
        imbalances=_imbalances(sizes, peak_bytes),
        gpu_bytes=gpu_bytes,
        context_bytes=context_bytes,
        fragmentation=fragmentation,
        num_micro_batches=num_micro_batches,
        tokens=tokens or _configured_tokens(config),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
    )


def _imbalances(sizes: Sizes, peak_bytes: int) -> list[Imbalance]:
    """Return the loads that are asked about; neither the rows allocated nor anything else depends on them."""
    moe = sizes.model.moe
    mean = sizes.T * moe.experts_per_token / moe.num_experts
    busiest = {"x 1, balanced": mean, "x 2": min(2 * mean, sizes.T), "all to the same experts": sizes.T}
    return [Imbalance(name=name, busiest=round(num), rows=sizes.R, peak=peak_bytes) for name, num in busiest.items()]


def _configured_tokens(config: RunConfig) -> float:
    """Return the tokens that the run trains on from its first to its last step."""
    train, first, sequences = config.train, 0, 0
    for stage in train.batch_ramp:
        last = min(stage.until_step, train.num_steps)
        sequences += max(0, last - first) * stage.sequences
        first = max(first, last)
    sequences += (train.num_steps - first) * train.global_batch_sequences
    return float(sequences * config.data.sequence_length)


def _rows_in(record: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of every list called ``rows``, however deep it lies."""
    if isinstance(record, dict):
        for name, value in record.items():
            yield from value if name == "rows" else _rows_in(value)
    elif isinstance(record, list):
        for value in record:
            yield from _rows_in(value)


def throughput_from(
    path: Path, *, shape: str, num_parameters: int | None, gpus: int, routing: str, backend: str
) -> Throughput:
    """Return the throughput from a JSON of benchmarks/train_step.py, or one that holds several such.

    A row is of the model if its ``parameters`` are as many or, where either is not given, its shape is called so. Of
    those with this routing and backend it takes the one whose number of GPUs is nearest, the larger first, and of
    equals the last.

    Raises: ThroughputError, naming the rows that there are, if none fits; OSError if there is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = list(_rows_in(record))
        if not rows:
            raise LookupError("rows")
        named = [(row["shape"], row["routing"], row["backend"]) for row in rows]
        speeds = [(int(row["gpus"]), float(row["tokens_per_s_per_gpu"])) for row in rows]
        sizes = [row.get("parameters") for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
        raise ThroughputError(
            f"{path} is not a benchmark of training steps: it needs rows with shape, routing, backend, gpus and "
            f"tokens_per_s_per_gpu"
        ) from problem
    for count, speed in speeds:
        if count < 1 or not (isfinite(speed) and speed > 0):
            raise ThroughputError(f"{path} has a row of {speed} tokens/s/GPU on {count} GPUs, both must be above 0")
    fitting = [
        (row, *speed)
        for row, name, size, speed in zip(rows, named, sizes, speeds, strict=True)
        if name[1:] == (routing, backend)
        and (name[0] == shape if num_parameters is None or size is None else size == num_parameters)
    ]
    if not fitting:
        there = sorted({", ".join(map(str, name)) for name in named})
        raise ThroughputError(
            f"{path} has no row of shape {shape}, routing {routing}, backend {backend}; it has: "
            f"{'; '.join(there) or 'none'}. Name its shape with --shape, or give --throughput"
        )
    row, count, speed = min(reversed(fitting), key=lambda one: (abs(one[1] - gpus), -one[1]))
    equals = [other for _, other_count, other in fitting if other_count == count]
    knobs = ", ".join(f"{name} {row[name]}" for name in ("checkpointing", "attention", "compile") if name in row)
    others = f" of {len(equals)}, from {min(equals):,.0f} to {max(equals):,.0f} tokens/s/GPU" * (len(equals) > 1)
    note = f"--benchmark: the last row that fits{others}; {count} GPUs{', ' * bool(knobs)}{knobs}; knobs may differ"
    return Throughput(speed, note)
