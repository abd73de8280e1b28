"""What launch.doctor asks that may hang or crash, each in a process of its own: ``python -m launch.probe WHAT``.

A probe prints one line of JSON and judges nothing: what its numbers mean is in machine_checks.py and gpu_checks.py, and
the time limits are in probes.py.
"""

import json
import os
import platform
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_kernels import BackendName, MoEProblem, RoutingKind, arch_of, moe_experts, route_top_k
from moe_kernels.cute.compile import default_cache_folder
from moe_kernels.dispatch import BACKENDS, Backend

_PACKAGES = {"triton": "triton", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "wandb": "wandb"}
_MATMUL, _COPY_BYTES = 8192, 2 * 2**30
_BLOCK = 4 * 2**20


def software() -> dict[str, Any]:
    """Return versions of what a run imports, and the GPUs that torch sees."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "arch": f"sm{properties.major}{properties.minor}",
                "memory": properties.total_memory,
                "peers": [
                    other
                    for other in range(torch.cuda.device_count())
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
        )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "gpus": gpus,
        "packages": {module: _version(module, package) for module, package in _PACKAGES.items()},
    }


def _version(module: str, package: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # importable, but installed under another name
        return "unknown version"


def rates(device: str) -> dict[str, float]:
    """Return the rates of a bf16 matrix product (FLOP/s) and of a copy (bytes/s read and written) on a GPU."""
    a, b = (torch.randn(_MATMUL, _MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    matmul_s, copy_s = _seconds(lambda: torch.mm(a, b), 40), _seconds(lambda: target.copy_(source), 40)
    return {"matmul": 2 * _MATMUL**3 / matmul_s, "copy": 2 * _COPY_BYTES / copy_s}


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    for _ in range(repeats // 4):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def experts(device: str) -> dict[str, Any]:
    """Return which backend runs a small layer in bf16 on ``device``, and how far it is from the reference in fp32.

    Errors are relative norms of the output and of the gradients of x, both weights and the scores.
    """
    T, D, N, E, K = 512, 256, 256, 8, 2
    torch.manual_seed(0)
    shapes = ((T, D), (E, 2 * N, D), (E, D, N))
    narrow = [torch.randn(shape, device=device).mul_(0.1).bfloat16() for shape in shapes]
    score_TE = torch.randn(T, E, device=device).softmax(-1)
    plan = route_top_k(score_TE, K).plan
    problem = MoEProblem(
        T=T,
        D=D,
        N=N,
        E=E,
        K=K,
        tile_m=1,
        routing=RoutingKind.top_k,
        dtype=torch.bfloat16,
        arch=arch_of(torch.device(device)),
    )
    reason = BACKENDS[BackendName.cute_sm90].why_not(problem)
    backend = BACKENDS[BackendName.portable if reason else BackendName.cute_sm90]

    def run(backend: Backend, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, score_TE)]
        x_TD, w_gate_up, w_down, scores = leaves
        out_TD = moe_experts(x_TD, w_gate_up, w_down, scores, plan, backend=backend)
        return [out_TD.detach(), *torch.autograd.grad(out_TD.float().square().sum(), leaves)]

    start = time.perf_counter()
    results = run(backend, narrow)
    seconds = time.perf_counter() - start
    truths = run(BACKENDS[BackendName.reference], [tensor.float() for tensor in narrow])
    error = [float((x.float() - truth).norm() / truth.norm()) for x, truth in zip(results, truths, strict=True)]
    folder = default_cache_folder()
    return {
        "backend": backend.name,
        "why_not_cute": reason,
        "error": max(error),
        "seconds": seconds,
        "cache": str(folder) if folder else "no folder: there is no HOME",
        "keeps_kernels": folder is not None and os.access(_existing(folder), os.W_OK),
    }


def group(rank: str, size: str, folder: str) -> dict[str, Any]:
    """Return whether a sum over ``size`` processes is right in this one, and its bus bandwidth (bytes/s).

    Over NCCL with a GPU each where there are that many, else over gloo. The processes meet in ``folder``.
    """
    own, num = int(rank), int(size)
    on_gpu = torch.cuda.device_count() >= num
    device = torch.device("cuda", own) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "store"), num
    )
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=own, world_size=num, device_id=device if on_gpu else None
    )
    numbers = torch.full((1024,), float(own + 1), device=device)
    dist.all_reduce(numbers)
    right = bool((numbers == num * (num + 1) / 2).all())
    large = torch.zeros((2**28 if on_gpu else 2**20) // 4, device=device)
    for _ in range(3):
        dist.all_reduce(large)
    if on_gpu:
        torch.cuda.synchronize()
    start, repeats = time.perf_counter(), 10
    for _ in range(repeats):
        dist.all_reduce(large)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    dist.barrier()
    return {
        "over": "nccl" if on_gpu else "gloo",
        "right": right,
        "bandwidth": 2 * (num - 1) / num * large.nbytes / seconds,
    }


def disk(folder: str, size: str) -> dict[str, Any]:
    """Return what is free where ``folder`` is to be, and the rate (bytes/s) at which ``size`` bytes come to that disk.

    The rate is None where nothing can be written or so much is not free.
    """
    there = _existing(Path(folder))
    free = shutil.disk_usage(there).free
    is_writable = there.is_dir() and os.access(there, os.W_OK)
    rate = _write_rate(there, int(size)) if is_writable and free > int(size) else None
    return {"folder": str(there), "free": free, "writable": is_writable, "rate": rate}


def _write_rate(folder: Path, size: int) -> float:
    path = folder / f".doctor-{os.getpid()}"
    block, num_blocks = os.urandom(_BLOCK), max(1, size // _BLOCK)
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(num_blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return num_blocks * _BLOCK / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def _existing(path: Path) -> Path:
    """Return ``path``, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def reach(url: str) -> dict[str, Any]:
    """Return the status that a server answers with: any answer means that it can be reached."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return {"status": answer.status}
    except urllib.error.HTTPError as answer:
        return {"status": answer.code}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe for probe in (software, rates, experts, group, disk, reach)
}


def main(arguments: list[str]) -> None:
    """Print what a probe returns, and end the process without taking the interpreter down."""
    print(json.dumps(PROBES[arguments[0]](*arguments[1:])), flush=True)
    # Threads of a process group may still hold tensors: see World.leave in training/world.py.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
