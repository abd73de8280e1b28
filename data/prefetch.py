"""Batches made ahead of their use, by one thread and in the order asked for.

It only moves work in time: what a batch holds depends on its request alone (data/loader.py), so nothing of it is saved
with a run.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from data.batch import Batch
from data.loader import RowSource


def prefetch(
    rows: RowSource, requests: Iterable[tuple[int, int]], *, depth: int = 2, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Yield ``rows.batch(first_sample, num_sequences)`` for every request, at most ``depth`` of them made ahead.

    ``pin_memory`` puts them into page-locked memory, from which a copy to a GPU runs beside its work. An error in
    making a batch is raised where that batch would have been yielded. Closing the iterator ends the thread.

    Raises:
        ValueError: when ``depth`` is below 1.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    return _prefetched(rows, requests, depth, pin_memory)


def _prefetched(
    rows: RowSource, requests: Iterable[tuple[int, int]], depth: int, pin_memory: bool
) -> Generator[Batch, None, None]:
    def make(first_sample: int, num_sequences: int) -> Batch:
        batch = rows.batch(first_sample, num_sequences)
        return batch.pin_memory() if pin_memory else batch

    ahead: deque[Future[Batch]] = deque()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        for request in requests:
            ahead.append(executor.submit(make, *request))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
