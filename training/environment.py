"""What a process of a run stands on besides the others (world.py): threads, and the wish to stop."""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as a shell says it


def fix_numerics(num_threads: int, *, seed: int) -> None:
    """Fix what could make two runs differ: torch's generator, and on the CPU the threads that share a sum."""
    torch.manual_seed(seed)
    torch.set_num_threads(num_threads)
    log.info("torch %s, %d CPU threads", torch.__version__, num_threads)


def hide_objects() -> None:
    """Take all objects that there are out of the garbage collector's sight, until ``gc.unfreeze()``.

    A full collection walks every object, and a model of 40 compiled blocks has half a million: 0.3 s (measured on a
    CPU), in which every other process waits. Call it once the first step has compiled what steps run. Objects are still
    freed with their last reference; only cycles among those hidden are not.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def objects_seen_again() -> Iterator[None]:
    """At the end of the block, put what ``hide_objects`` hid in it back into the garbage collector's sight."""
    try:
        yield
    finally:
        gc.unfreeze()


class StopRequest:
    """Remembers SIGTERM, SIGINT or SIGHUP, so that the loop can save before it leaves.

    Use as a context manager around the loop. A second SIGINT interrupts at once, as it would without this.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        log.warning("%s: will save and stop after this step", self.signal.name)

    def __bool__(self) -> bool:
        return self.signal is not None
