"""What torch.compile needs, and what has been compiled so far in this process.

The numbers have to stand still once a run is warm.
"""

import os
import sys
import tempfile

import torch

from moe_kernels import Backend
from moe_kernels.cute.ops import CuteSm90Backend


def count_compilations(backend: Backend) -> dict[str, float]:
    """Return the ``compile/…`` metrics: graphs that torch.compile made, and kernels that ``backend`` compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # where nothing was compiled, it need not be imported to say so
    counts = {"compile/graphs": 0.0 if dynamo is None else float(dynamo.counters["stats"]["unique_graphs"])}
    if isinstance(backend, CuteSm90Backend):
        counts["compile/kernels"] = float(backend.cache.num_compiled)
    return counts


def require_compiler(device: torch.device) -> None:
    """Check that compiled code has a place and, on the CPU, a compiler; else the first step would fail with a trace.

    Raises: ValueError that names the knob or the variable.
    """
    try:
        # Only where blocks are compiled: it takes a second to import, and makes the folder.
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415

        with tempfile.TemporaryFile(dir=cache_dir()):
            pass
    except OSError as problem:
        raise ValueError(
            f"parallel.compile=true has no place for compiled code ({problem}): set TORCHINDUCTOR_CACHE_DIR, which is "
            f"{os.environ.get('TORCHINDUCTOR_CACHE_DIR')}, to a folder that can be written, or parallel.compile=false"
        ) from problem
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - writes where the compiled code goes
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as problem:
        raise ValueError(
            "parallel.compile=true needs a C++ compiler on the CPU and found no g++: install one, name one in CXX, or "
            "set parallel.compile=false"
        ) from problem
