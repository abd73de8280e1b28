"""Which micro-batches a process gets, and in what order."""

import itertools
from collections.abc import Generator
from contextlib import closing

from data.loader import RowSource
from data.prefetch import prefetch
from training.step import MicroBatch
from training.world import World


def deal(rows: RowSource, world: World, *, size: int, start: int = 0) -> Generator[MicroBatch, None, None]:
    """Yield this process's micro-batches of ``size`` sequences from sample ``start`` on, made ahead by a thread.

    A step is a fixed list of micro-batches; process r of n takes number r, r + n, r + 2n of every step.
    """
    mine = (start + size * number for number in itertools.count(world.rank, world.size))
    firsts, requests = itertools.tee(mine)
    asked = ((first, size) for first in requests)
    with closing(prefetch(rows, asked, pin_memory=world.device.type == "cuda")) as batches:
        for first, batch in zip(firsts, batches, strict=True):
            yield MicroBatch.of(batch.to(world.device), first)
