import threading

import pytest
import torch

from data.config import DataConfig
from data.loader import open_prepared
from data.prefetch import prefetch


@pytest.fixture(scope="module")
def train(small_root):
    return open_prepared(DataConfig(root=str(small_root), sequence_length=32)).train


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetched_batches_are_those_asked_for_in_order(train, depth):
    requests = [(8 * step, 8) for step in range(7)]
    batches = list(prefetch(train, requests, depth=depth))
    assert len(batches) == 7
    for batch, request in zip(batches, requests, strict=True):
        assert torch.equal(batch.input_ids_BS, train.batch(*request).input_ids_BS)
    assert not prefetch_threads()


def test_no_more_than_the_depth_is_made_ahead(train):
    asked = []

    def requests():
        for step in range(100):
            asked.append(step)
            yield 8 * step, 8

    batches = prefetch(train, requests(), depth=3)
    for used in range(1, 6):
        next(batches)
        assert len(asked) == used + 3
    batches.close()


def test_an_error_is_raised_at_its_batch_and_ends_the_thread(train):
    batches = prefetch(train, [(0, 4), (-1, 4), (8, 4)])
    assert next(batches).input_ids_BS.shape == (4, 32)
    with pytest.raises(ValueError, match="first_sample=-1"):
        next(batches)
    assert not prefetch_threads()


def test_closing_ends_the_thread(train):
    batches = prefetch(train, ((8 * step, 8) for step in range(10**6)))
    next(batches)
    assert prefetch_threads()
    batches.close()
    assert not prefetch_threads()


def test_depth_below_one_is_refused(train):
    with pytest.raises(ValueError, match="depth=0"):
        prefetch(train, [(0, 1)], depth=0)
