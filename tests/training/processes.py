"""What tests of several processes on one machine share."""

import os
import socket
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.config import DeviceName
from training.world import World, open_world


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, world_size: int, port: int, device: DeviceName) -> World:
    """Return the world of process ``rank`` of ``world_size`` on this machine that meet at ``port``."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    return open_world(device)


class FileBlock:
    """Stands for training.peer_copies.SymmetricBlock among processes on CPUs: memory that is a file for each."""

    numbers: ClassVar[Counter[str]] = Counter()  # of blocks that this process made with a group

    def __init__(
        self, folder: Path, num: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"{'_'.join(map(str, ranks))}-{FileBlock.numbers[str(ranks)]}"
        FileBlock.numbers[str(ranks)] += 1
        self._group = group
        self._of = [
            torch.from_file(str(folder / f"{name}-{rank}.block"), shared=True, size=num, dtype=dtype)
            for rank in range(group.size())
        ]
        self._of[group.rank()].fill_(torch.nan)
        self.meet()

    def of(self, rank: int) -> Tensor:
        return self._of[rank]

    def meet(self) -> None:
        dist.barrier(self._group)
