"""Starts other programs with a time limit, and the words in which a check of launch.doctor answers."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_DEATH_S = 5.0


class Status(Enum):
    """How a check ended."""

    ok = "ok"
    warn = "warn"  # a run works, but slower or with a risk
    fail = "FAIL"  # a run will not work here


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    status: Status
    name: str
    text: str
    advice: str = ""  # what to do, unless it is ok

    def __str__(self) -> str:
        return f"{self.status.value:<4}  {self.name:<18}  {self.text}{f'. {self.advice}' if self.advice else ''}"


class ProgramError(RuntimeError):
    """A program could not be started, left with an error or took too long; the message says which."""


def run_program(command: Sequence[str], *, timeout_s: float) -> str:
    """Return what a program wrote to stdout. Raises: ProgramError."""
    (output,) = run_programs([command], timeout_s=timeout_s)
    if isinstance(output, ProgramError):
        raise output
    return output


def run_programs(commands: Sequence[Sequence[str]], *, timeout_s: float) -> list[str | ProgramError]:
    """Run programs beside each other and return what each wrote to stdout, or why it did not come to its end.

    What runs longer than ``timeout_s`` is killed, and left alone where even that does not end it.
    """
    deadline = time.monotonic() + timeout_s
    started = [_start(command) for command in commands]
    return [
        process if isinstance(process, ProgramError) else _finish(process, command, deadline, timeout_s)
        for process, command in zip(started, commands, strict=True)
    ]


def _start(command: Sequence[str]) -> "subprocess.Popen[str] | ProgramError":
    try:
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as problem:
        return ProgramError(f"{command[0]} could not be started: {problem}")


def _finish(
    process: "subprocess.Popen[str]", command: Sequence[str], deadline: float, timeout_s: float
) -> str | ProgramError:
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a driver or a dead disk inside the kernel dies when that answers, or never.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_DEATH_S)
        return ProgramError(f"no answer within {timeout_s:g} s")
    if process.returncode != 0:
        lines = [line for line in (errors or output).strip().splitlines() if line.strip()]
        said = lines[-1].strip()[:300] if lines else "nothing was said"
        return ProgramError(f"{Path(command[0]).name} left with exit code {process.returncode}: {said}")
    return output


def ask(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """Return the answer of a probe. Raises: ProgramError."""
    (answer,) = ask_all([arguments], timeout_s=timeout_s)
    if isinstance(answer, ProgramError):
        raise answer
    return answer


def ask_all(probes: Sequence[Sequence[str]], *, timeout_s: float) -> list[dict[str, Any] | ProgramError]:
    """Return the answers of probes that run beside each other, or why one has none."""
    commands = [[sys.executable, "-m", "launch.probe", *probe] for probe in probes]
    return [
        output if isinstance(output, ProgramError) else json.loads(output.strip().splitlines()[-1])
        for output in run_programs(commands, timeout_s=timeout_s)
    ]
