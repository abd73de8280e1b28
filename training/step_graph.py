"""The forwards and backwards of a step recorded once as a CUDA graph, and launched as one from then on.

What is left for the host is the optimiser's part, which it prepares while the graph runs: a model of narrow blocks is
no longer as slow as Python (docs/performance.md). Gathering parameters and summing gradients are in the graph too.
Source of the idea: Megatron-LM's full-iteration graph (NVIDIA/Megatron-LM, megatron/core/full_cuda_graph.py).
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from data.batch import Batch
from model.attend import AttentionKernel
from model.decoder import Decoder
from training.config import RunConfig
from training.parallel import compiles, forget_forwards
from training.step import Accumulate, Accumulated, Lap, MicroBatch, StepInput
from training.world import World

# The first compiles and allocates; the second meets what the first left behind, as all later ones do.
PLAIN_STEPS = 2
STEPS_BEFORE_GRAPH = PLAIN_STEPS + 1  # in a run, whose first is of a kind of its own: it has no counts of one before


class Graph(Protocol):
    """What torch.cuda.CUDAGraph is to this module."""

    def replay(self) -> None:
        """Launch what was recorded."""

    def reset(self) -> None:
        """Give its memory back."""


class Recording(NamedTuple):
    """Work that was recorded, and has not run yet."""

    graph: Graph
    found: Accumulated  # what it will fill
    peak_bytes: int  # of memory allocated on the device while it runs


Record = Callable[[Callable[[], Accumulated]], Recording]


class _Recorded(NamedTuple):
    recording: Recording
    inputs: StepInput
    gradients: list[tuple[torch.nn.Parameter, Tensor]]


def check_step_graph(config: RunConfig, world: World) -> None:
    """Raise ValueError if ``parallel.cuda_graph`` is asked for where steps cannot be recorded."""
    if not config.parallel.cuda_graph:
        return
    if world.device.type != "cuda":
        raise ValueError(
            f"parallel.cuda_graph=true records the work of a CUDA device, and this run computes on the "
            f"{world.device.type}: set parallel.cuda_graph=false (parallel=one_host sets it and parallel.peer_copies, "
            "parallel=fsdp neither)"
        )
    if (
        config.data.mask_documents
        and config.kernels.attention is not AttentionKernel.sdpa
        and not compiles(config.parallel, world.device)
    ):
        raise ValueError(
            "parallel.cuda_graph=true with data.mask_documents=true and parallel.compile=false: FlexAttention outside "
            "of compiled blocks copies from the host, which no graph records. Set parallel.compile=true, or "
            "kernels.attention=sdpa"
        )
    # Source: Megatron-LM, megatron/core/transformer/cuda_graphs.py, which asserts the same.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    expandable = [name for name in names if "expandable_segments:True" in os.environ.get(name, "")]
    if world.size > 1 and expandable and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise ValueError(
            f"parallel.cuda_graph=true with {expandable[0]}=expandable_segments:True: NCCL may hang where it registers "
            "such memory for a graph. Set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out"
        )


def record_on_device(work: Callable[[], Accumulated]) -> Recording:
    """Return what ``work`` launches on the current CUDA device.

    Raises: RuntimeError, naming the knob, if something in it cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.reset_peak_memory_stats()
    try:
        # Threads that make batches and watch collectives go on meanwhile; only this one must not wait for the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = work()
    except RuntimeError as problem:
        # Where the work fails, ending the recording does too, and that error stands before the one that says why.
        cause = problem.__context__ or problem
        raise RuntimeError(f"the step cannot be recorded ({cause}): set parallel.cuda_graph=false") from cause
    return Recording(graph, found, torch.cuda.max_memory_allocated())


class StepGraph:
    """Stands for the forwards and backwards of a step (``run`` of ``train_step``) once two of its kind were taken.

    Of another kind is a step with other shapes or another number of micro-batches: it is taken as it is, and the graph
    made anew after two of them. A graph keeps the memory that it needs from one step to the next.
    """

    def __init__(self, model: Decoder, *, record: Record = record_on_device) -> None:
        self._model = model
        self._record = record
        self._kind: Any = None
        self._num_plain = 0  # steps of this kind so far
        self._recorded: _Recorded | None = None

    @property
    def peak_bytes(self) -> int:
        """The most device memory allocated while the graph runs, which torch counts only while it is made; or 0."""
        return 0 if self._recorded is None else self._recorded.recording.peak_bytes

    def __call__(self, accumulate: Accumulate, step_input: StepInput, lap: Lap) -> Accumulated:
        """Do what ``accumulate`` does. What it returns holds the numbers of the next step once that is taken.

        The graph's time goes to the lap "backward".
        """
        kind = _kind(step_input)
        if kind != self._kind:
            self.close()
            self._kind = kind
        if self._recorded is None and self._num_plain < PLAIN_STEPS:
            self._num_plain += 1
            return accumulate(step_input, lap)
        # What an evaluation left gathered would be old after this step, in which FSDP's Python has no part.
        forget_forwards(self._model)
        if self._recorded is None:
            self._recorded = self._make(accumulate, step_input)
        recording, inputs, gradients = self._recorded
        torch._foreach_copy_(_tensors(inputs), _tensors(step_input))
        recording.graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        lap("backward")
        return recording.found

    def _make(self, accumulate: Accumulate, step_input: StepInput) -> _Recorded:
        inputs = _copy(step_input)
        recording = self._record(lambda: accumulate(inputs, lambda part: None))
        parameters = self._model.parameters()
        return _Recorded(recording, inputs, [(p, p.grad) for p in parameters if p.grad is not None])

    def close(self) -> None:
        """Forget the graph and what it fills; before processes part, because it holds on to their communicators."""
        if self._recorded is not None:
            for parameter, _ in self._recorded.gradients:
                parameter.grad = None
            self._recorded.recording.graph.reset()
        self._recorded = None
        self._kind, self._num_plain = None, 0


def peak_bytes(device: torch.device, graph: StepGraph | None) -> int:
    """Return the most memory allocated on the CUDA ``device`` since its count was reset, while ``graph`` ran too."""
    return max(torch.cuda.max_memory_allocated(device), 0 if graph is None else graph.peak_bytes)


def _tensors(step_input: StepInput) -> list[Tensor]:
    tensors = [tensor for micro in step_input.micro_batches for tensor in (*micro.batch, micro.first_sample)]
    return tensors if step_input.previous_count_LE is None else [*tensors, step_input.previous_count_LE]


def _kind(step_input: StepInput) -> Any:
    """Return what two steps have to agree in to share a graph."""
    return step_input.mask_documents, [(tensor.shape, tensor.dtype) for tensor in _tensors(step_input)]


def _copy(step_input: StepInput) -> StepInput:
    """Return inputs of the same shapes in memory of their own."""
    previous = step_input.previous_count_LE
    return StepInput(
        micro_batches=[
            MicroBatch(Batch(*(tensor.clone() for tensor in micro.batch)), micro.first_sample.clone())
            for micro in step_input.micro_batches
        ],
        previous_count_LE=None if previous is None else previous.clone(),
        mask_documents=step_input.mask_documents,
    )
