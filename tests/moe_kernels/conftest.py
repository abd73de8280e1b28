"""One thread, because the tensors here are tiny and the machine may be shared; and a backend that counts its calls."""

from collections import Counter

import pytest
import torch

from moe_kernels import BackendName
from moe_kernels.dispatch import BACKENDS
from moe_kernels.reference.ops import ReferenceBackend

OPS = ("up", "up_inference", "rows_matmul", "gather_scores", "combine", "down_backward", "weight_grad")


class CountingBackend(ReferenceBackend):
    """The reference ops, counted, and strict about the layout of what they are given."""

    def __init__(self):
        self.calls = Counter()
        self.inside = False

    def __getattribute__(self, name):
        op = super().__getattribute__(name)
        if name not in OPS or self.inside:
            return op

        def counted(*args, **kwargs):
            self.calls[name] += 1
            for argument in args:
                if isinstance(argument, torch.Tensor):
                    is_matrix_of_experts = name == "rows_matmul" and argument.dim() == 3
                    assert argument.is_contiguous() or (is_matrix_of_experts and argument.mT.is_contiguous())
            self.inside = True
            result = op(*args, **kwargs)
            self.inside = False
            return result

        return counted

    def forward_calls(self, *, writes_h):
        up = "up" if writes_h else "up_inference"
        return Counter({up: 1, "gather_scores": 1, "rows_matmul": 1, "combine": 1})


@pytest.fixture
def counting(monkeypatch):
    backend = CountingBackend()
    monkeypatch.setitem(BACKENDS, BackendName.reference, backend)
    return backend


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
