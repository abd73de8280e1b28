"""One thread: the tensors here are tiny, and the machine may be shared."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
