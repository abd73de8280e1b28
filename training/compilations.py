"""What has been compiled so far in this process: the numbers that have to stand still once a run is warm."""

import sys

from moe_kernels import Backend
from moe_kernels.cute.ops import CuteSm90Backend


def count_compilations(backend: Backend) -> dict[str, float]:
    """Return the ``compile/…`` metrics: graphs that torch.compile made, and kernels that ``backend`` compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # where nothing was compiled, it need not be imported to say so
    counts = {"compile/graphs": 0.0 if dynamo is None else float(dynamo.counters["stats"]["unique_graphs"])}
    if isinstance(backend, CuteSm90Backend):
        counts["compile/kernels"] = float(backend.cache.num_compiled)
    return counts
