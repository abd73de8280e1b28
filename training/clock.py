"""Moments of a process, on the host and on the device; what the time between them is called is metrics.py."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments now and tells the time between them later."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one."""


class HostClock:
    """Moments of the host; ``now`` returns seconds and only moves forward."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """Return the host's time."""
        return self._now()

    def seconds(self, start: float, end: float) -> float:
        """Return their difference."""
        return end - start


class DeviceClock:
    """Moments at which a CUDA device has done what it was given so far: the host runs ahead of it and doesn't wait."""

    def mark(self) -> torch.cuda.Event:
        """Put a mark behind what the current stream has to do."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the device's time between two marks; waits until it is past the second."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on ``device`` is timed."""
    return DeviceClock() if device.type == "cuda" else HostClock()
