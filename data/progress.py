"""How far a preparation is, on standard error: a line that a terminal sees rewritten, a log every few seconds."""

import sys
import time
from typing import TextIO

TERMINAL_INTERVAL_S = 0.2
LOG_INTERVAL_S = 5.0


class Progress:
    """Counts what has been read and written, and prints it now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._line_open = False
        self._start_s = self._printed_s = time.monotonic()
        self.documents = self.text_bytes = self.tokens = 0

    def say(self, message: str) -> None:
        """Print one line that stays."""
        print(("\n" if self._line_open else "") + message, file=self._stream, flush=True)
        self._line_open = False

    def start(self) -> None:
        """Begin the time that the printed rate counts."""
        self._start_s = time.monotonic()

    def add(self, *, documents: int, text_bytes: int, tokens: int) -> None:
        """Add to the counts."""
        self.documents += documents
        self.text_bytes += text_bytes
        self.tokens += tokens
        now_s = time.monotonic()
        if now_s - self._printed_s < (TERMINAL_INTERVAL_S if self._terminal else LOG_INTERVAL_S):
            return
        self._printed_s = now_s
        line = (
            f"{self.documents:,} documents, {self.text_bytes / 1e6:,.1f} MB, {self.tokens:,} tokens, "
            f"{self.tokens / (now_s - self._start_s):,.0f} tokens/s"
        )
        print(
            f"\r{line}\033[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._stream,
            flush=True,
        )
        self._line_open = self._terminal
