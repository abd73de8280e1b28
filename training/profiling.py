"""Looks at a few steps of a run: a trace, the table that breakdown.py makes of it, and a snapshot of device memory.

The steps of the trace lie between two others: one before them, because the recorder's own start shows in it, and one
after them for the memory, because writing down every allocation takes time that the table must not show. The device has
nothing left to do when the steps of the trace begin and when they end, so that all of their work, and no other, lies
between; they are chosen so that no evaluation and no save does.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from training.breakdown import WINDOW, Breakdown, Sizes, break_down, read_trace
from training.config import RunConfig
from training.world import World

log = logging.getLogger(__name__)

_MEMORY_EVENTS = 200_000


class Recording:
    """Steps being recorded on ``device``: ``warm``, ``begin``, ``end``, then ``write``.

    ``close`` ends it early: a process that leaves with a recorder or a range open crashes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: Any = profile(activities=activities, record_shapes=True)
        self._open = ExitStack()  # what has to be closed, the newest first

    def warm(self) -> None:
        """Start the recorder."""
        self._profile.start()
        self._open.callback(self._profile.stop)

    def begin(self) -> None:
        """Open the range that is looked at."""
        self._wait()
        self._open.enter_context(record_function(WINDOW))

    def end(self) -> None:
        """Close it and stop the recorder."""
        self._wait()
        self.close()

    def close(self) -> None:
        """Close what is open, whatever the steps have come to."""
        self._open.close()

    def write(self, stem: Path, sizes: Sizes, *, num_steps: int) -> Breakdown:
        """Write trace and table to files that begin with ``stem``, all of them or none; return the table.

        Raises: OSError if they cannot be written, ValueError if the recorder wrote no trace that can be read.
        """

        def write_into(folder: Path) -> Breakdown:
            trace = folder / f"{stem.name}.trace.json.gz"
            self._profile.export_chrome_trace(str(trace))
            table = break_down(read_trace(trace), sizes, num_steps=num_steps)
            (folder / f"{stem.name}.time.txt").write_text(table.as_text(), encoding="utf-8")
            (folder / f"{stem.name}.time.json").write_text(table.as_json(), encoding="utf-8")
            return table

        return _write_whole(stem, write_into)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _write_whole(stem: Path, write_into: Callable[[Path], Any]) -> Any:
    """Have ``write_into`` fill a folder, then move its files beside ``stem``; return what it returns."""
    partial = stem.with_name(stem.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        written = write_into(partial)
        for path in sorted(partial.iterdir()):
            path.replace(stem.parent / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


class StepProfiler:
    """With ``profile=true``, records the steps that ``profiler`` names, in the first process; else does nothing.

    Use as a context manager around the loop. ``folder`` gets the files, ``step`` is where the run stands. The steps are
    the first after ``profiler.skip_steps`` that have no evaluation and no save between them.
    """

    def __init__(self, config: RunConfig, world: World, folder: Path, *, step: int) -> None:
        self._is_on = config.profile and world.is_first
        self._config = config.profiler
        self._takes_memory = config.profiler.memory and world.device.type == "cuda"
        self._interruptions = [
            every for every in (config.evaluation.every_steps, config.checkpoint.every_steps) if every > 0
        ]
        self._sizes = Sizes(num_experts=config.model.moe.num_experts, vocab_size=config.model.vocab_size)
        self._folder = folder
        self._device = world.device
        self._step = step
        self._first_step = step
        self._warm_step: int | None = None  # after which the recorder was started
        self._recording: Recording | None = None
        self._open = ExitStack()  # what has to be closed, the newest first

    def __enter__(self) -> Self:
        self._advance()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if self._is_on and kind is None:
            log.warning(
                "profile=true, but the run ended before profiler.skip_steps=%d, one step to warm up, "
                "profiler.num_steps=%d and one for the memory were over, with no evaluation and no save between them",
                self._config.skip_steps,
                self._config.num_steps,
            )

    def step(self, number: int) -> None:
        """Note that optimiser step ``number`` (from 1) of the run has been launched."""
        self._step = number
        self._advance()

    def _advance(self) -> None:
        """Do what is due after step ``self._step``."""
        if not self._is_on:
            return
        if self._warm_step is None:
            if self._step - self._first_step < self._config.skip_steps or self._is_interrupted():
                return
            self._warm_step = self._step
            self._recording = Recording(self._device)
            self._open.callback(self._recording.close)
            self._recording.warm()
        elif self._step == self._warm_step + 1:
            assert self._recording is not None
            self._recording.begin()
        elif self._step == self._warm_step + 1 + self._config.num_steps:
            assert self._recording is not None
            self._recording.end()
            self._is_on = self._takes_memory
            self._write(self._write_time)
            self._open.close()
            self._recording = None  # its events are large
            if self._takes_memory:
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS, stacks="python")
                self._open.callback(torch.cuda.memory._record_memory_history, enabled=None)
        elif self._step == self._warm_step + 2 + self._config.num_steps:
            self._is_on = False
            self._write(self._write_memory)
            self._open.close()

    def _is_interrupted(self) -> bool:
        """Say whether an evaluation or a save would be recorded if the recorder was started now."""
        # What came after the step that the run stands at was another process's.
        between = range(max(self._step, self._first_step + 1), self._step + self._config.num_in_a_row)
        return any(step % every == 0 for step in between for every in self._interruptions)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as problem:
            log.warning("the profile cannot be written to %s, and the run goes on without: %s", self._folder, problem)

    def _write_time(self) -> None:
        assert self._recording is not None
        last, num_steps = self._step, self._config.num_steps
        first = last - num_steps + 1
        stem = self._folder / f"steps_{first:08d}_to_{last:08d}"
        table = self._recording.write(stem, self._sizes, num_steps=num_steps)
        log.info("profile of steps %d to %d in %s:\n%s", first, last, self._folder, table.as_text())

    def _write_memory(self) -> None:
        name = f"step_{self._step:08d}.memory"

        def write_into(folder: Path) -> None:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))

        _write_whole(self._folder / name, write_into)
