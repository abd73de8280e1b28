"""The processes of a run: who they are, and the few sums and agreements that they need. Sharding is in parallel.py."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.config import DeviceName

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; alone where it did not."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run folder, logs, and talks to wandb."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all processes, on each of them."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of ``tensor`` over all processes, on each of them."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return tensor
        reduced = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(reduced, operation)
        return reduced

    def any(self, flag: bool) -> bool:
        """Say whether ``flag`` is true in any process.

        The processes agree on the CPU, over gloo, so that the host waits for the others' hosts and for no kernel.
        """
        if self.size == 1:
            return flag
        agreed = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return bool(agreed)

    def first(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returned in the first process, where alone it runs.

        Raises: ValueError or OSError in every process if it did in the first.
        """
        if self.size == 1:
            return make()
        answer: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.is_first:
            try:
                answer = [(make(), None)]
            except ValueError as problem:  # their subclasses need not survive the way
                answer = [(None, ValueError(str(problem)))]
            except OSError as problem:
                answer = [(None, OSError(str(problem)))]
        dist.broadcast_object_list(answer, device=self.device)
        value, error = answer[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def require_same(self, **values: str) -> None:
        """Compare short descriptions between the processes.

        Raises: ValueError in every process, naming those that differ.
        """
        if self.size == 1:
            return
        gathered: list[dict[str, str]] = [{}] * self.size
        dist.all_gather_object(gathered, values)
        differing = [name for name in values if len({other[name] for other in gathered}) > 1]
        if differing:
            raise ValueError(
                f"the {self.size} processes do not run the same thing: they differ in {', '.join(differing)}. "
                + "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(gathered))
            )

    def close(self) -> None:
        """Leave the group in order. After an error don't: the others may be waiting in it, and torchrun ends them."""
        dist.barrier()
        dist.destroy_process_group()

    def leave(self, exit_code: int, *, alone: bool = False) -> NoReturn:
        """Leave the group in order and end the process with ``exit_code``; everything has to be written by then.

        ``alone`` leaves it without a word to the other processes, which may be anywhere when one cannot go on.

        The interpreter is not taken down: the group's threads can still hold tensors whose release needs it, and one
        that finds it gone aborts the process ("terminate called without an active exception", seen with gloo in one
        end of five).
        """
        if not alone:
            self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def open_world(name: DeviceName) -> World:
    """Join the processes that torchrun started: tensors on GPUs travel over NCCL, those on CPUs over gloo.

    A process that torchrun did not start makes a group of its own, so that what is sharded works alone too.

    Raises: ValueError if ``run.device=cuda`` and torch finds none.
    """
    device = _choose_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL would guess the device from the rank, and hang where the guess is wrong.
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=device_id)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT, device_id=device_id)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def _choose_device(name: DeviceName) -> torch.device:
    if name is DeviceName.cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if name is DeviceName.cuda:
        raise ValueError("run.device=cuda, but torch finds no CUDA device; use run.device=auto or run.device=cpu")
    return torch.device("cpu")
