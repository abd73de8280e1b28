"""What tests of several processes on one machine share."""

import os
import socket

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
