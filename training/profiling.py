"""Looks at a few steps of a run: a trace, the table that breakdown.py makes of it, and a snapshot of device memory.

The steps of the trace lie between two others: one before them, because the recorder's own start shows in it, and one
after them for the memory, because writing down every allocation takes time that the table must not show. The device has
nothing left to do when the steps of the trace begin and when they end, so that all of their work, and no other, lies
between.
"""

import logging
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
    """Steps being recorded on ``device``: ``warm``, ``begin``, ``end``, then ``write``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: Any = profile(activities=activities, record_shapes=True)
        self._window: Any = record_function(WINDOW)

    def warm(self) -> None:
        """Start the recorder."""
        self._profile.start()

    def begin(self) -> None:
        """Open the range that is looked at."""
        self._wait()
        self._window.__enter__()

    def end(self) -> None:
        """Close it and stop the recorder."""
        self._wait()
        self._window.__exit__(None, None, None)
        self._profile.stop()

    def write(self, stem: Path, sizes: Sizes, *, num_steps: int) -> Breakdown:
        """Write trace and table to files that begin with ``stem``; return the table."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        trace = stem.with_name(stem.name + ".trace.json.gz")
        self._profile.export_chrome_trace(str(trace))
        table = break_down(read_trace(trace), sizes, num_steps=num_steps)
        stem.with_name(stem.name + ".time.txt").write_text(table.as_text(), encoding="utf-8")
        stem.with_name(stem.name + ".time.json").write_text(table.as_json(), encoding="utf-8")
        return table

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StepProfiler:
    """With ``profile=true``, records the steps that ``profiler`` names, in the first process; else does nothing.

    Use as a context manager around the loop. ``folder`` gets the files.
    """

    def __init__(self, config: RunConfig, world: World, folder: Path) -> None:
        self._is_on = config.profile and world.is_first
        self._config = config.profiler
        self._takes_memory = config.profiler.memory and world.device.type == "cuda"
        self._sizes = Sizes(num_experts=config.model.moe.num_experts, vocab_size=config.model.vocab_size)
        self._folder = folder
        self._device = world.device
        self._num_taken = 0  # steps since the loop began
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        self._advance(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on and kind is None:
            log.warning(
                "profile=true, but the run ended before profiler.skip_steps=%d, one step to warm up, "
                "profiler.num_steps=%d and one for the memory were over",
                self._config.skip_steps,
                self._config.num_steps,
            )

    def step(self, number: int) -> None:
        """Note that optimiser step ``number`` (from 1) of the run has been launched."""
        self._num_taken += 1
        self._advance(number)

    def _advance(self, number: int) -> None:
        """Do what is due after step ``number``."""
        if not self._is_on:
            return
        since_skipped = self._num_taken - self._config.skip_steps
        num_steps = self._config.num_steps
        if since_skipped == 0:
            self._recording = Recording(self._device)
            self._recording.warm()
        elif since_skipped == 1:
            assert self._recording is not None
            self._recording.begin()
        elif since_skipped == 1 + num_steps:
            self._write_time(number)
            if self._takes_memory:
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS, stacks="python")
            self._is_on = self._takes_memory
        elif since_skipped == 2 + num_steps:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"step_{number:08d}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._is_on = False

    def _write_time(self, last: int) -> None:
        assert self._recording is not None
        self._recording.end()
        first = last - self._config.num_steps + 1
        stem = self._folder / f"steps_{first:08d}_to_{last:08d}"
        table = self._recording.write(stem, self._sizes, num_steps=self._config.num_steps)
        log.info("profile of steps %d to %d in %s:\n%s", first, last, self._folder, table.as_text())
        self._recording = None
