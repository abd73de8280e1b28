"""What a process of a run stands on besides the others (world.py): threads, and the wish to stop."""

import logging
import signal
from types import FrameType

import torch

log = logging.getLogger(__name__)


def fix_numerics(num_threads: int, *, seed: int) -> None:
    """Fix what could make two runs differ: torch's generator, and on the CPU the threads that share a sum."""
    torch.manual_seed(seed)
    torch.set_num_threads(num_threads)
    log.info("torch %s, %d CPU threads", torch.__version__, num_threads)


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
