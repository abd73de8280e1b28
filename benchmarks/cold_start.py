"""The first step of a fresh process, in seconds: with empty caches of kernels, and again with what that step left.

``--cold-start`` of benchmarks.moe_layer. Torch is imported and the inputs are on the GPU when the clock starts. What is
counted is our imports, the router's and the plan's kernels, and the experts' forward and backward to their end,
compilation included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.layer_inputs import make_inputs
from benchmarks.options import need_gpu
from benchmarks.shapes import SHAPES


def cold_and_warm(shape_name: str, backend: str, device: str = "cuda") -> dict[str, dict[str, float]]:
    """Return the seconds of a first step from empty caches, and of one in another process from the caches on disk."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "benchmarks.cold_start", shape_name, backend, device]
        for name in ("empty_caches", "disk_caches"):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_step(shape_name: str, backend_name: str, device: str) -> dict[str, float]:
    """Return the seconds of this process's first step and of its parts, and of a second step."""
    shape = SHAPES[shape_name]
    inputs = make_inputs(shape, "uniform", seed=1, device=device)
    _let_torch_import_what_it_needs()
    clock = _Clock(device)
    from benchmarks import whole_layer  # noqa: PLC0415 - its imports are part of what is timed
    from moe_kernels import BackendName, RoutingKind, moe_experts  # noqa: PLC0415
    from moe_kernels.dispatch import BACKENDS  # noqa: PLC0415

    backend = BACKENDS[BackendName(backend_name)]
    clock.lap("imports_s")
    router = whole_layer.make_router(shape, inputs.router_ED)
    leaves = [tensor.requires_grad_() for tensor in (inputs.x_TD, router.weight, inputs.w_gate_up, inputs.w_down)]

    def step(clock: _Clock) -> dict[str, float]:
        x_TD, _, w_gate_up, w_down = leaves
        routed = whole_layer.route(router, x_TD, RoutingKind.token_rounding)
        clock.lap("routing_s")
        out_TD = moe_experts(x_TD, w_gate_up, w_down, routed.score_TE, routed.routing.plan, backend=backend)
        clock.lap("experts_forward_s")
        torch.autograd.grad(out_TD, leaves, inputs.dout_TD)
        clock.lap("backward_s")
        return clock.laps

    first = step(clock)
    second = step(_Clock(device))
    return {"first_step_s": sum(first.values()), **first, "second_step_s": sum(second.values())}


def _let_torch_import_what_it_needs() -> None:
    """Differentiate with a gradient given, for which torch imports sympy at its first time."""
    leaf = torch.zeros(1, requires_grad=True)
    torch.autograd.grad(leaf * 1, leaf, torch.ones(1))


class _Clock:
    """Seconds between one finished part and the next."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.laps: dict[str, float] = {}
        self._wait()
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        self._wait()
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def report(shape_name: str, found: dict[str, dict[str, float]]) -> None:
    """Print a line for each of the two processes."""
    for name, seconds in found.items():
        parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
        print(f"{shape_name:14s} {name}: {parts}", flush=True)


def main() -> None:
    """Take one first step and print its seconds as JSON: what ``cold_and_warm`` starts as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("backend")
    parser.add_argument("device", nargs="?", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu()
    print(json.dumps(first_step(arguments.shape, arguments.backend, arguments.device)))


if __name__ == "__main__":
    main()
