"""Peak device memory of one process of a run: its parts at every moment of a step that may be the worst.

What blocks need is activations.py. Here is the rest of a step as training/parallel.py, training/step.py, FSDP-2 and
model/losses.py take it: shards, gathered parameters and the buffers that they and their gradients pass through, the
head. The figures are to be those of torch.cuda.max_memory_allocated; what a device holds beyond that is plan.py's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import ceil

from launch.activations import Moment, Sizes, block_memory, evaluation_bytes
from launch.layout import Layout, Unit
from model.losses import CHUNK_TOKENS
from training.config import OptimizerStates, RunConfig

_FP32 = 4
_INT8_STATES_PER_SCALE = 256  # in torchao's AdamW8bit
# Taken from torch's allocator with a thread's first matrix product, of the forward and of the backward; on Hopper.
_CUBLAS_WORKSPACE_BYTES = 2 * 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes on one device at one moment, by what they are for."""

    parameters: int = 0  # this process's, fp32
    moments: int = 0  # AdamW's two
    gradients: int = 0  # this process's, fp32, summed over processes
    unsummed: int = 0  # gradients of micro-batches before the last, whole, fp32
    gathered: int = 0  # whole parameters in the dtype that blocks compute in, and the buffers that they come through
    in_place: int = 0  # whole parameters in the memory that they are gathered in, kept for good
    reducing: int = 0  # whole gradients of the unit at work, and the buffers that they are summed through
    activations: int = 0  # kept from the forward to the backward, or made again for it
    workspace: int = 0  # of the block at work
    head: int = 0  # logits of a chunk of tokens; gradients of the head's weight and input
    peers: int = 0  # blocks that other GPUs read, kept for good; torch does not count them as allocated
    libraries: int = _CUBLAS_WORKSPACE_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class StepMoment:
    """One moment of a step."""

    name: str
    parts: Parts


def moments_bytes(num: int, states: OptimizerStates) -> int:
    """Return the bytes of AdamW's two moments of ``num`` parameters."""
    if states is OptimizerStates.int8:
        return 2 * (num + _FP32 * ceil(num / _INT8_STATES_PER_SCALE))
    return 2 * _FP32 * num


def step_moments(config: RunConfig, sizes: Sizes, layout: Layout, *, num_micro_batches: int) -> list[StepMoment]:
    """Return the moments of an optimiser step, not a run's first, of which one is the worst; in the step's order.

    ``num_micro_batches`` are a process's in a step; the moments are those of the last one. With
    ``parallel.cuda_graph`` an evaluation comes after them.
    """
    step = _Step(config, sizes, layout, num_micro_batches)
    moments = [*step.forward(), *step.head(), *step.backward(), *step.end()]
    return [*moments, step.evaluation_beside(peak(moments))] if config.records_steps else moments


def peak(moments: list[StepMoment]) -> StepMoment:
    """Return the moment at which most is needed."""
    return max(moments, key=lambda moment: moment.parts.total)


class _Step:
    """One step of one process, walked through in the order of its moments."""

    def __init__(self, config: RunConfig, sizes: Sizes, layout: Layout, num_micro_batches: int) -> None:
        self._s, self._layout = sizes, layout
        self._reshards = config.parallel.reshard_after_forward
        self._per_unit = config.parallel.blocks_per_unit
        self._ahead = ceil(config.parallel.prefetch_blocks / self._per_unit)  # units
        self._blocks = [block_memory(sizes, layer) for layer in range(config.model.num_layers)]
        self._kept = [0]  # by the blocks before each
        for block in self._blocks:
            self._kept.append(self._kept[-1] + block.kept)
        is_accumulating = num_micro_batches > 1
        # Sums that wait for the step's last micro-batch are whole; without FSDP a process's own are the whole.
        self._has_unsummed = is_accumulating and layout.is_sharded and not config.parallel.sum_every_micro_batch
        self._has_summed = is_accumulating and not self._has_unsummed
        self._has_peers = config.parallel.peer_copies and layout.shards > 1
        self._base = Parts(
            parameters=_FP32 * layout.total.shard,
            moments=moments_bytes(layout.total.shard, config.optim.states),
            # The final norm is never compiled.
            activations=sizes.mask + _FP32 * sizes.T + sizes.T * sizes.D * (_FP32 + sizes.c),
            peers=self._peer_blocks(is_accumulating) if self._has_peers else 0,
            in_place=0 if self._has_peers else sizes.c * layout.total.in_place,
            # A graph is recorded in a stream of its own, which has its own workspaces.
            libraries=(2 if config.records_steps else 1) * _CUBLAS_WORKSPACE_BYTES,
        )

    def forward(self) -> Iterator[StepMoment]:
        """Yield the moments of the blocks' forward."""
        for layer, block in enumerate(self._blocks):
            parts = replace(
                self._base,
                gradients=self._gradients(done=0),
                unsummed=self._unsummed(done=0),
                gathered=self._gathered_in_forward(layer),
                activations=self._s.mask + self._kept[layer] + block.forward.activations,
                workspace=block.forward.workspace,
            )
            yield StepMoment(name=f"forward of block {layer}, {block.forward.name}", parts=parts)

    def head(self) -> Iterator[StepMoment]:
        """Yield the moments of the loss, whose gradients are computed in its forward, and of its backward."""
        s = self._s
        V = s.model.vocab_size
        logits, num_chunks = self._logits(), ceil(s.T / CHUNK_TOKENS)
        weight, wide_weight = s.c * V * s.D, _FP32 * V * s.D
        # The head's gradient, and a later chunk's share of it.
        in_chunk = logits + min(num_chunks, 2) * wide_weight
        base = replace(
            self._base,
            gradients=self._gradients(done=0),
            unsummed=self._unsummed(done=0),
            activations=self._base.activations + self._kept[-1],
        )
        kept = s.stream + wide_weight
        yield StepMoment(
            name="loss", parts=replace(base, gathered=self._gathered_at_head(), head=2 * s.stream + in_chunk)
        )
        backward = replace(base, gathered=self._gathered_in_backward(len(self._layout.units)))
        yield StepMoment(name="backward of the loss", parts=replace(backward, head=kept + s.stream + weight))
        if self._layout.is_sharded and not self._layout.is_tied:
            yield self._summing("head", self._layout.head, done=0, parts=replace(backward, head=2 * s.stream))

    def backward(self) -> Iterator[StepMoment]:
        """Yield the moments of the blocks' backward, the last block first."""
        for layer in reversed(range(len(self._blocks))):
            number = layer // self._per_unit
            done = len(self._layout.units) - number  # units whose gradients are there
            base = replace(
                self._base,
                gradients=self._gradients(done=done),
                unsummed=self._unsummed(done=done),
                gathered=self._gathered_in_backward(number),
                reducing=self._buffer_before(number) + self._unreduced(layer) + self._tied_gradient(),
                activations=self._s.mask + self._kept[layer],
            )
            for moment in self._blocks[layer].backward:
                yield StepMoment(
                    name=f"backward of block {layer}, {moment.name}",
                    parts=self._in_block(base, moment, self._layout.blocks[layer]),
                )
            if self._layout.is_sharded and layer % self._per_unit == 0:
                parts = replace(base, workspace=self._s.stream, reducing=self._tied_gradient())
                yield self._summing(f"block {layer}", self._layout.units[number], done=done, parts=parts)

    def end(self) -> Iterator[StepMoment]:
        """Yield the moments of the embedding's backward and of the optimiser."""
        unit, done = self._layout.embed, len(self._blocks) + 1
        gradient = self._s.c * self._s.model.vocab_size * self._s.D
        parts = replace(
            self._base,
            gradients=self._gradients(done=done),
            unsummed=self._unsummed(done=done),
            gathered=self._gathered(unit, with_buffer=False),
            activations=0,
            workspace=self._s.stream,
            # The head's gradient is added to the embedding's in a third tensor.
            reducing=self._buffer_before(-1) + (2 * gradient if self._layout.is_tied else 0),
        )
        yield StepMoment(name="backward of the embedding", parts=replace(parts, reducing=parts.reducing + gradient))
        if self._layout.is_sharded:
            yield self._summing("embedding", unit, done=done, parts=replace(parts, reducing=0))
        yield StepMoment(
            name="optimiser", parts=replace(self._base, activations=0, gradients=_FP32 * self._layout.total.shard)
        )

    def evaluation_beside(self, worst: StepMoment) -> StepMoment:
        """Return an evaluation's worst moment where the step is a graph, which keeps what ``worst`` needs meanwhile."""
        s = self._s
        moments = [
            Parts(gathered=self._gathered_in_forward(layer), workspace=evaluation_bytes(s, layer))
            for layer in range(len(self._blocks))
        ]
        moments.append(Parts(gathered=self._gathered_at_head(), head=2 * s.stream + self._logits()))
        extra = max(moments, key=lambda parts: parts.total)
        parts = replace(
            worst.parts,
            gathered=worst.parts.gathered + extra.gathered,
            activations=worst.parts.activations + s.mask,
            workspace=worst.parts.workspace + extra.workspace,
            head=worst.parts.head + extra.head,
        )
        return StepMoment(name=f"evaluation, while the graph keeps what it needs in {worst.name}", parts=parts)

    def _peer_blocks(self, is_accumulating: bool) -> int:
        """Return the bytes of the blocks through which parameters come and gradients go: one for each size of a unit.

        For parameters those of units on their way come to it, and the memory of those that are gathered in place.
        """
        layout = self._layout
        sizes = [unit.copied for unit in layout.units]
        ends = (layout.embed, layout.head)
        ahead = min(1 + max(1, self._ahead), sizes.count(max(sizes))) - 1
        gathered = sum(unit.copied for unit in ends) + sum(set(sizes)) + ahead * max(sizes)
        reduced = sum(unit.whole for unit in ends) + sum({unit.whole for unit in layout.units})
        wide = _FP32 if is_accumulating else self._s.c
        return self._s.c * (gathered + layout.total.in_place) + wide * reduced

    def _logits(self) -> int:
        """Return the bytes of the logits of a chunk of tokens."""
        return self._s.c * self._s.model.vocab_size * min(CHUNK_TOKENS, self._s.T)

    def _in_block(self, base: Parts, moment: Moment, unit: Unit) -> Parts:
        own = self._s.c * unit.whole if moment.has_expert_gradients else 0
        return replace(
            base,
            activations=base.activations + moment.activations,
            workspace=moment.workspace,
            reducing=base.reducing + own,
        )

    def _summing(self, name: str, unit: Unit, *, done: int, parts: Parts) -> StepMoment:
        """Return the worst moment of the sum over processes of a unit's gradients, with the result in it."""
        wide, own = _FP32 * unit.whole, 0 if self._has_unsummed else self._s.c * unit.whole
        if self._layout.shards == 1:
            # What gradients are copied into is their sum. Where there are other copies, it is divided by 1 on the way.
            result, reducing = wide, max(own, wide if self._layout.replicas > 1 else 0)
        elif own > _FP32 * unit.shard:
            result, reducing = 0, wide + own
        else:
            result, reducing = _FP32 * unit.shard, wide
        return StepMoment(
            name=f"sum of the {name}'s gradients",
            parts=replace(parts, gradients=parts.gradients + result, reducing=parts.reducing + reducing),
        )

    def _units_done(self, done: int) -> list[Unit]:
        """Return the units whose gradients are there after the backward of the head and of ``done - 1`` units."""
        if done == 0:
            return []
        units = self._layout.units
        return [self._layout.head, *units[len(units) - (done - 1) :]] if done > 1 else [self._layout.head]

    def _gradients(self, *, done: int) -> int:
        if self._has_summed:
            return _FP32 * self._layout.total.shard
        return _FP32 * sum(unit.shard for unit in self._units_done(done))

    def _unsummed(self, *, done: int) -> int:
        if not self._has_unsummed:
            return 0
        return _FP32 * (self._layout.total.whole - sum(unit.whole for unit in self._units_done(done)))

    def _gathered(self, unit: Unit, *, with_buffer: bool) -> int:
        """Return the bytes of a gathered unit; the buffer that it came through is as large, and not made alone."""
        if not self._layout.is_sharded:
            return 0
        return self._s.c * unit.copied * (2 if with_buffer and self._layout.shards > 1 else 1)

    def _gathered_root(self) -> int:
        """Return the bytes of what stays gathered for the whole forward and backward: a tied embedding."""
        return self._gathered(self._layout.embed, with_buffer=False) if self._layout.is_tied else 0

    def _gathered_units(self, end: int) -> int:
        """Return the bytes of the units of blocks before ``end`` that were not freed after their forward."""
        if self._reshards:
            return 0
        embed = 0 if self._layout.is_tied else self._gathered(self._layout.embed, with_buffer=False)
        return embed + sum(self._gathered(unit, with_buffer=False) for unit in self._layout.units[:end])

    def _gathered_at_head(self) -> int:
        """Return the bytes gathered for the loss, which needs the head, or a tied embedding, which came first."""
        unit = self._layout.embed if self._layout.is_tied else self._layout.head
        here = self._gathered(unit, with_buffer=not self._layout.is_tied)
        return here + self._gathered_units(len(self._layout.units))

    def _gathered_in_forward(self, layer: int) -> int:
        units, number = self._layout.units, layer // self._per_unit
        here = self._gathered(units[number], with_buffer=True) + self._gathered_root()
        return here + self._gathered_units(number) + self._buffers(units[number + 1 : number + 1 + self._ahead])

    def _gathered_in_backward(self, number: int) -> int:
        """Return the bytes of unit ``number``, or of the head past the last one, and of those asked for ahead."""
        units = self._layout.units
        unit = units[number] if number < len(units) else self._layout.head
        here = self._gathered(unit, with_buffer=False) + self._gathered_root()
        if not self._reshards:
            own = self._gathered(unit, with_buffer=False) if number < len(units) else 0
            return here - own + self._gathered_units(number + 1)
        return here + self._buffers(units[max(0, number - max(1, self._ahead)) : number])

    def _buffers(self, units: tuple[Unit, ...]) -> int:
        """Return the bytes of units that are on their way: each in the buffer that it comes through."""
        if self._layout.shards == 1 or not self._layout.is_sharded:
            return 0
        return self._s.c * sum(unit.copied for unit in units)

    def _buffer_before(self, number: int) -> int:
        """Return the bytes in which what comes after unit ``number`` was summed: they stay until the next sum."""
        if not self._layout.is_sharded or self._layout.shards == 1:  # there they are the gradients
            return 0
        units = self._layout.units
        unit = units[number + 1] if number + 1 < len(units) else self._layout.head
        return _FP32 * unit.whole

    def _unreduced(self, layer: int) -> int:
        """Return the bytes of whole gradients of the blocks after ``layer`` in its unit, which wait for all of it."""
        if not self._layout.is_sharded:
            return 0  # there are no units, and a gradient is in its place at once
        end = (layer // self._per_unit + 1) * self._per_unit
        return self._s.c * sum(block.whole for block in self._layout.blocks[layer + 1 : end])

    def _tied_gradient(self) -> int:
        """Return the bytes of the head's gradient where it waits for the embedding's."""
        return self._s.c * self._s.model.vocab_size * self._s.D if self._layout.is_tied else 0
