"""Memory that processes read from each other: what travels between which meetings, and when it is used again."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import training.peer_copies
from training.config import ParallelConfig, RunConfig
from training.gather import Gather
from training.parallel import check_peer_copies
from training.peer_copies import PeerMemory
from training.trainer import Trainer
from training.world import World

RANK, SIZE = 1, 3


class Group:
    """This process's view of three."""

    def rank(self) -> int:
        return RANK

    def size(self) -> int:
        return SIZE


class Blocks:
    """Makes blocks in whose other processes the right numbers stand between the first meeting and the second alone."""

    def __init__(self) -> None:
        self.made: list[Blocks.Block] = []

    def make(self, num: int, dtype: torch.dtype, device: torch.device, group: Any) -> "Blocks.Block":
        self.made.append(Blocks.Block(self, num, dtype))
        return self.made[-1]

    class Block:
        def __init__(self, blocks: "Blocks", num: int, dtype: torch.dtype) -> None:
            self._blocks = blocks
            self._of = [torch.full((num,), torch.nan, dtype=dtype) for _ in range(SIZE)]
            self.num_meetings = 0

        def of(self, rank: int) -> Tensor:
            return self._of[rank]

        def meet(self) -> None:
            self.num_meetings += 1
            for block in self._blocks.made:  # all processes come to all blocks
                for rank in set(range(SIZE)) - {RANK}:
                    there = 100.0 * rank + torch.arange(len(block.of(rank)))
                    block.of(rank).copy_(there if self.num_meetings % 2 else torch.full_like(there, torch.nan))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    blocks = Blocks()
    monkeypatch.setattr(training.peer_copies, "SymmetricBlock", blocks.make)
    return blocks


@pytest.fixture
def memory(blocks: Blocks) -> PeerMemory:
    return PeerMemory(Group())  # type: ignore[arg-type]


CPU = torch.device("cpu")


def test_a_gather_takes_each_processs_part_from_it(memory: PeerMemory, blocks: Blocks) -> None:
    gather = Gather(Group(), torch.float32, memory)  # type: ignore[arg-type]
    whole = gather.allocate((6,), dtype=torch.float32, device=CPU)
    mine = whole[2 * RANK : 2 * RANK + 2]
    mine.copy_(torch.tensor([7.0, 8.0]))
    gather(whole, mine, group=None)  # type: ignore[arg-type]
    assert whole.tolist() == [0, 1, 7, 8, 204, 205]
    assert blocks.made[0].num_meetings == 2
    with pytest.raises(ValueError, match="async_op"):
        gather(whole, mine, group=None, async_op=True)  # type: ignore[arg-type]


def test_several_are_gathered_between_one_pair_of_meetings(memory: PeerMemory, blocks: Blocks) -> None:
    first, second = memory.allocate(3, torch.float32, CPU), memory.allocate(6, torch.float32, CPU)
    first[RANK], second[2 * RANK : 2 * RANK + 2] = 7.0, 8.0
    memory.gather(first, second)
    assert first.tolist() == [0, 7, 202]
    assert second.tolist() == [0, 1, 8, 8, 204, 205]
    assert [block.num_meetings for block in blocks.made] == [2, 0]


def test_a_collection_takes_this_processs_part_from_each(memory: PeerMemory, blocks: Blocks) -> None:
    mine = memory.allocate(6, torch.float32, CPU)
    mine.copy_(torch.arange(10.0, 16.0))
    assert memory.collect(mine).tolist() == [[2, 3], [12, 13], [202, 203]]
    assert mine.tolist() == [10, 11, 12, 13, 14, 15]
    assert blocks.made[0].num_meetings == 2


def test_a_block_is_used_again_once_nothing_holds_on_to_it(memory: PeerMemory, blocks: Blocks) -> None:
    first = memory.allocate(6, torch.float32, CPU)
    second = memory.allocate(6, torch.float32, CPU)
    assert first.data_ptr() != second.data_ptr()
    address, part = first.data_ptr(), first.view(3, 2)[1]
    del first
    third = memory.allocate(6, torch.float32, CPU)  # a part of the first is still held
    assert third.data_ptr() not in (address, second.data_ptr())
    del part
    assert memory.allocate(6, torch.float32, CPU).data_ptr() == address
    assert len(blocks.made) == 3
    memory.allocate(6, torch.bfloat16, CPU)
    memory.allocate(3, torch.float32, CPU)
    assert len(blocks.made) == 5


def test_processes_of_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    world = World(rank=0, size=16, device=torch.device("cuda", 0))
    check_peer_copies(ParallelConfig(peer_copies=False), world)
    for degree in (8, 4):
        check_peer_copies(ParallelConfig(peer_copies=True, shard_degree=degree), world)
    with pytest.raises(ValueError, match=r"has 8 processes, and 16 .*parallel\.shard_degree to a divisor of 8"):
        check_peer_copies(ParallelConfig(peer_copies=True), world)


def test_a_cpu_has_no_peers(small_run: Callable[..., RunConfig]) -> None:
    assert "LOCAL_WORLD_SIZE" not in os.environ
    world = World(rank=0, size=1, device=CPU)
    with pytest.raises(ValueError, match=r"computes on the cpu: set parallel\.peer_copies=false"):
        Trainer(small_run("run.device=cpu", "parallel.peer_copies=true"), world)
