"""Notices a step whose gradient was not finite without making the host wait for the device.

Such a step left everything as it was (step.py). Its numbers are copied to the host beside the next step's work and read
once that is on its way, so the error comes a step late; ``settle`` reads them before anything is logged or saved.
"""

from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from training.step import StepResult


class _Pending(NamedTuple):
    step: int  # from 1
    numbers: Tensor  # on the host once the event has happened: gradient norm, cross-entropy, valid tokens
    copied: torch.cuda.Event | None


class StepGuard:
    """Raises FloatingPointError, naming the step, once it is known that a gradient norm was not finite."""

    def __init__(self) -> None:
        self._pending: _Pending | None = None

    def watch(self, step: int, result: StepResult) -> None:
        """Start to read step ``step`` (from 1), which has just been launched, and check the one before it.

        Raises: FloatingPointError for the step before.
        """
        numbers = torch.stack([result.grad_norm.double(), result.losses.ce.double(), result.num_valid.double()])
        copied = None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        before, self._pending = self._pending, _Pending(step, numbers, copied)
        _check(before)

    def settle(self) -> None:
        """Wait for the newest step and check it.

        Raises: FloatingPointError.
        """
        newest, self._pending = self._pending, None
        _check(newest)


def _check(pending: _Pending | None) -> None:
    if pending is None:
        return
    if pending.copied is not None:
        pending.copied.synchronize()
    grad_norm, ce, num_valid = pending.numbers.tolist()
    if not isfinite(grad_norm):
        raise FloatingPointError(
            f"in step {pending.step} the gradient norm is {grad_norm} (cross-entropy {ce:.4f} over {int(num_valid)} "
            "valid tokens); the step was skipped and nothing is saved after it"
        )
