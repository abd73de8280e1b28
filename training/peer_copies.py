"""Parameters and gradients that the GPUs of one host copy out of each other's memory, by their copy engines.

NCCL's kernels hold multiprocessors while they send, and the experts' kernels beside them do without (measured in
docs/performance.md). Here nobody sends: every process reads its part of the others' memory, and one small kernel before
and one after wait until all are there. Gradients are summed as in exchange.py. Source of the idea, and of the memory
that others can read: torch.distributed._symmetric_memory and its low-contention collectives (pytorch 2.11).
"""

import os
from typing import Protocol

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from training.world import TIMEOUT


class Block(Protocol):
    """Memory that every process of a group has, as much in each, and that the others can read."""

    def of(self, rank: int) -> Tensor:
        """Return that of the group's process ``rank``, as one row."""

    def meet(self) -> None:
        """Have the current stream wait until it has come here in every process."""


class SymmetricBlock:
    """A block on GPUs of one host. To make it, all processes of the group have to meet."""

    def __init__(self, num: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        # Not public, and imported here because only this needs it.
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("memory for copies between GPUs cannot be made while a step is recorded")
        # Nothing here is broadcast, and where a machine does not allow it, asking for it does harm.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._num, self._dtype = num, dtype
        torch.cuda.empty_cache()  # the memory is the driver's, and what torch keeps for later is not free for it
        try:
            self._own = symmetric.empty(num, dtype=dtype, device=device)
            # Its flags are zeroed in the device's default stream: behind all that is launched there, and maybe behind
            # another process's first arrival (pytorch #192308).
            torch.cuda.synchronize(device)
            self._handle = symmetric.rendezvous(self._own, group)
            self._check()
        except RuntimeError as problem:
            what = f"memory that the other GPUs of this host can read cannot be made ({problem})"
            raise RuntimeError(f"{what}: set parallel.peer_copies=false") from problem

    def of(self, rank: int) -> Tensor:
        """Return that of the group's process ``rank``, as one row."""
        return self._handle.get_buffer(rank, (self._num,), self._dtype)

    def meet(self) -> None:
        """Have the current stream wait until it has come here in every process.

        One that does not come within world.py's time is named by a kernel that ends all of this process's work.
        """
        self._handle.barrier(channel=0, timeout_ms=int(TIMEOUT.total_seconds() * 1000))

    def _check(self) -> None:
        ranks = range(self._handle.world_size)
        self._own.fill_(self._handle.rank)
        self.meet()
        found = [self.of(rank)[:: max(1, self._num - 1)].tolist() for rank in ranks]  # the first and the last value
        self.meet()
        if any(value != rank for rank, values in zip(ranks, found, strict=True) for value in values):
            raise RuntimeError(f"of the numbers of processes {list(ranks)}, {found} were read")


class PeerMemory:
    """Blocks of one group, kept from use to use, and the two ways in which their contents travel.

    Every process asks for the same blocks in the same order. What ``allocate`` returned is free for another use once no
    tensor holds on to it, in the order of the stream in which it is asked for, as with torch's own allocator.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._blocks: dict[tuple[int, torch.dtype], list[Block]] = {}
        # By address, every block and what it was lent as last.
        self._lent: dict[int, tuple[Block, StorageWeakRef]] = {}

    def allocate(self, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``num`` values that the others can read, with any contents.

        Raises: RuntimeError, naming the knob, if the GPUs cannot reach each other.
        """
        rank, blocks = self._group.rank(), self._blocks.setdefault((num, dtype), [])
        for block in blocks:
            _, last = self._lent[block.of(rank).data_ptr()]
            if last.expired():
                return self._lend(block)
        blocks.append(SymmetricBlock(num, dtype, device, self._group))
        return self._lend(blocks[-1])

    def _lend(self, block: Block) -> Tensor:
        own = block.of(self._group.rank())
        # The same memory in a storage of its own, whose end says that it is free.
        lent: Tensor = torch.utils.dlpack.from_dlpack(own)
        self._lent[own.data_ptr()] = block, StorageWeakRef(lent.untyped_storage())
        return lent

    def gather(self, *tensors: Tensor) -> None:
        """Fill ``tensors``, from ``allocate``, where this process's parts stand already, with the others' parts."""
        blocks = [self._lent[tensor.data_ptr()][0] for tensor in tensors]
        blocks[0].meet()
        for rank in self._others():
            for block, tensor in zip(blocks, tensors, strict=True):
                parts_RX = tensor.view(self._group.size(), -1)
                parts_RX[rank].copy_(block.of(rank).view_as(parts_RX)[rank])
        blocks[0].meet()

    def collect(self, tensor: Tensor) -> Tensor:
        """Return as rows, in the order of the processes, what each has for this one in its ``tensor``.

        ``tensor`` is from ``allocate`` and holds a part for each process, in their order.
        """
        (block, _), own = self._lent[tensor.data_ptr()], self._group.rank()
        mine_RX = tensor.view(self._group.size(), -1)
        parts_RX = torch.empty_like(mine_RX)
        parts_RX[own].copy_(mine_RX[own])
        block.meet()
        for rank in self._others():
            parts_RX[rank].copy_(block.of(rank).view_as(mine_RX)[own])
        block.meet()
        return parts_RX

    def _others(self) -> list[int]:
        """Return the other processes, each process beginning with the one after it: no two read from the same."""
        rank, size = self._group.rank(), self._group.size()
        return [(rank + step) % size for step in range(1, size)]
