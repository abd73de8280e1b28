"""Times the routed experts, forward and backward, on one GPU: our backends and, side by side in one process, peers.

    python -m benchmarks.moe_layer --shapes olmoe,7b-n256 --routing uniform --backends cute_sm90,sonicmoe --json F

Every contender is checked against fp32 on a small layer before anything is timed. Rounds go through the contenders in
turn, because a card under load changes its clocks; what is printed is each one's median round. Backward is forward and
backward less forward. TFLOP/s count 6 and 12 · rows · D · N. Router and plan are given (sonic-moe builds its own
metadata in its time). Roof fractions divide the least time an op could take, at the rates of a large matrix product and
of a large copy measured in the same process, by its time.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.peers import PEERS, available_peers, interleave
from benchmarks.shapes import SHAPES, MoEShape, work_of
from moe_kernels import BackendName, RoutingPlan, moe_experts, route_token_rounding, route_top_k
from moe_kernels.dispatch import BACKENDS, Backend
from moe_kernels.routing.kinds import Rounding
from moe_kernels.side import GatheredSide

CHECK_SHAPE = MoEShape(T=1000, D=256, N=128, E=16, K=4)
CHECK_TOLERANCE = 1e-2  # relative Frobenius error of bf16 results: one rounding of the largest chain is 4e-3
ROUND_MS = 25.0  # of work per contender and round
TILE_M = 128


class Layer(NamedTuple):
    """One routed layer's inputs; every contender gets the same values."""

    x_TD: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    score_TE: Tensor
    dout_TD: Tensor
    plan: RoutingPlan
    expert_TK: Tensor | None  # None where the routing is not top-K
    used: int


def make_layer(shape: MoEShape, routing: str, seed: int) -> Layer:
    """Return random inputs of unit scale, routed uniformly, by Zipf(1.2) loads, or uniformly with token rounding."""
    T, D, N, E, K = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator, dtype=torch.bfloat16) * scale

    logits_TE = torch.randn(T, E, device="cuda", generator=generator)
    if routing == "zipf":
        popularity_E = torch.arange(1, E + 1, device="cuda").float().log() * -1.2
        gumbel_TE = -torch.empty(T, E, device="cuda").exponential_(generator=generator).log()
        logits_TE = popularity_E + gumbel_TE
    prob_TE = logits_TE.softmax(-1)
    expert_TK = prob_TE.topk(K, -1).indices.int()
    if routing == "rounded":
        plan = route_token_rounding(prob_TE, K, tile_m=TILE_M, rounding=Rounding.nearest).plan
    else:
        plan = route_top_k(prob_TE, K).plan
    return Layer(
        x_TD=normal(T, D),
        w_gate_up=normal(E, 2 * N, D, scale=D**-0.5),
        w_down=normal(E, D, N, scale=N**-0.5),
        score_TE=prob_TE,
        dout_TD=normal(T, D),
        plan=plan,
        expert_TK=None if routing == "rounded" else expert_TK,
        used=int(plan.expert_offsets_E1[-1]),
    )


class Contender(NamedTuple):
    """A forward over leaves of its own, in its own layout."""

    name: str
    leaves: tuple[Tensor, ...]
    forward: Callable[[], Tensor]


def make_contender(name: str, layer: Layer, peers: dict) -> Contender | None:
    """Return the contender ``name`` over ``layer``, or None where it cannot route so."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_()

    if name in peers:
        if layer.expert_TK is None:
            print(f"{name}: takes top-K routing only, left out")
            return None
        score_TK = layer.score_TE.gather(1, layer.expert_TK.long())
        leaves = (leaf(layer.x_TD), leaf(interleave(layer.w_gate_up)), leaf(layer.w_down), leaf(score_TK))
        return Contender(name, leaves, lambda: peers[name](*leaves, layer.expert_TK))
    backend = BACKENDS[BackendName(name)]
    leaves = (leaf(layer.x_TD), leaf(layer.w_gate_up), leaf(layer.w_down), leaf(layer.score_TE))
    return Contender(name, leaves, lambda: moe_experts(*leaves, layer.plan, backend=backend))


def check(name: str, routing: str, peers: dict) -> dict[str, float]:
    """Return relative errors of output and gradients of x and both weights against fp32 on a small layer.

    Raises: AssertionError if one is too large, or not a number.
    """
    layer = make_layer(CHECK_SHAPE, routing, seed=0)
    contender = make_contender(name, layer, peers)
    if contender is None:
        return {}
    out_TD = contender.forward()
    actual = [out_TD, *torch.autograd.grad(out_TD, contender.leaves, layer.dout_TD)[:3]]
    exact = [tensor.float().requires_grad_() for tensor in layer[:4]]
    out_TD = moe_experts(*exact, layer.plan, backend=BACKENDS[BackendName.reference])
    truth = [out_TD, *torch.autograd.grad(out_TD, exact, layer.dout_TD.float())[:3]]
    if name in peers:
        truth[2] = interleave(truth[2])
    names = ("out", "dx", "dw_gate_up", "dw_down")
    errors = {n: ((a.float() - t).norm() / t.norm()).item() for n, a, t in zip(names, actual, truth, strict=True)}
    assert all(error < CHECK_TOLERANCE for error in errors.values()), f"{name} is wrong: {errors}"
    return errors


def measure(contenders: list[Contender], layer: Layer, rounds: int) -> dict[str, dict]:
    """Return each contender's cold start, held and peak bytes, and median forward and backward milliseconds."""
    results: dict[str, dict] = {}
    steps: dict[str, dict[str, Callable]] = {}
    for contender in contenders:

        def both(contender: Contender = contender) -> None:
            torch.autograd.grad(contender.forward(), contender.leaves, layer.dout_TD)

        start = time.perf_counter()
        both()
        torch.cuda.synchronize()
        results[contender.name] = {"cold_start_s": time.perf_counter() - start, **_memory(contender, layer)}
        steps[contender.name] = {"forward": contender.forward, "both": both}
    for what in ("forward", "both"):
        times: dict[str, list[float]] = {name: [] for name in steps}
        repeats = {name: max(2, round(ROUND_MS / _time(s[what], 2))) for name, s in steps.items()}
        for _ in range(rounds):
            for name, s in steps.items():
                times[name].append(_time(s[what], repeats[name]))
        for name, rounds_ms in times.items():
            results[name][f"{what}_ms"] = sorted(rounds_ms)[len(rounds_ms) // 2]
    for result in results.values():
        result["backward_ms"] = result.pop("both_ms") - result["forward_ms"]
    return results


def _memory(contender: Contender, layer: Layer) -> dict[str, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out_TD = contender.forward()
    held = torch.cuda.memory_allocated() - before - out_TD.numel() * out_TD.element_size()
    torch.autograd.grad(out_TD, contender.leaves, layer.dout_TD)
    return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def _time(step: Callable, repeats: int) -> float:
    """Return milliseconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def measure_ops(backend: Backend, shape: MoEShape, layer: Layer, ceilings: dict[str, float]) -> dict[str, dict]:
    """Return each op's milliseconds, TFLOP/s, and the fraction of its roof."""
    plan, R = layer.plan, layer.plan.R
    h_R2N, a_RN, y_RD = (torch.randn(R, w, device="cuda").bfloat16() for w in (2 * shape.N, shape.N, shape.D))
    score_R = torch.rand(R, device="cuda")
    x, dout, w_gate_up, w_down = layer.x_TD, layer.dout_TD, layer.w_gate_up, layer.w_down
    steps = {
        "up": lambda: backend.up(x, w_gate_up, plan),
        "down": lambda: backend.rows_matmul(a_RN, w_down.transpose(1, 2), plan),
        "combine": lambda: backend.combine(y_RD, score_R, plan),
        "down_backward": lambda: backend.down_backward(dout, h_R2N, w_down, score_R, plan),
        "dw_down": lambda: backend.weight_grad(dout, a_RN, plan, gathered=GatheredSide.left),
        "dw_gate_up": lambda: backend.weight_grad(h_R2N, x, plan, gathered=GatheredSide.right),
        "dx": lambda: backend.rows_matmul(h_R2N, w_gate_up, plan),
        "sum": lambda: backend.combine(y_RD, None, plan),
    }
    results = {}
    for name, work in work_of(shape, layer.used).items():
        repeats = max(2, round(ROUND_MS / _time(steps[name], 3)))
        ms = sorted(_time(steps[name], repeats) for _ in range(3))[1]
        roof_ms = 1e3 * max(work.flops / ceilings["matmul_flops"], work.bytes / ceilings["copy_bytes"])
        results[name] = {
            "ms": ms,
            "tflops": work.flops / ms / 1e9,
            "tb_per_s": work.bytes / ms / 1e9,
            "roof_fraction": roof_ms / ms,
        }
    return results


def measure_ceilings() -> dict[str, float]:
    """Return the rates of an 8192³ bf16 matrix product (FLOP/s) and of a 4 GB copy (bytes read and written per s)."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    for _ in range(3):
        left @ right, target.copy_(source)
    matmul_ms = _time(lambda: left @ right, 30)
    copy_ms = _time(lambda: target.copy_(source), 10)
    return {"matmul_flops": 2 * 8192**3 / matmul_ms * 1e3, "copy_bytes": 2 * source.numel() * 2 / copy_ms * 1e3}


def report(name: str, shape_name: str, shape: MoEShape, rows: int, result: dict) -> None:
    """Add rates to ``result`` and print its line."""
    flops = 6 * rows * shape.D * shape.N
    result["forward_tflops"] = flops / result["forward_ms"] / 1e9
    result["backward_tflops"] = 2 * flops / result["backward_ms"] / 1e9
    print(
        f"{shape_name:12s} {name:10s} forward {result['forward_ms']:8.3f} ms {result['forward_tflops']:4.0f} TF"
        f"  backward {result['backward_ms']:8.3f} ms {result['backward_tflops']:4.0f} TF"
        f"  held {result['held_bytes'] / 2**20:6.0f} peak {result['peak_bytes'] / 2**20:6.0f} MiB"
        f"  cold {result['cold_start_s']:.1f} s",
        flush=True,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="7b-n256,olmoe,qwen3-30b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--routing", choices=["uniform", "zipf", "rounded"], default="uniform")
    parser.add_argument("--backends", default="cute_sm90", help=f"backends, and peers: {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ops", action="store_true", help="time the ops of cute_sm90 one by one too")
    parser.add_argument("--json", type=Path, help="write everything here, after every shape")
    arguments = parser.parse_args()
    names = arguments.backends.split(",")
    peers = available_peers([name for name in names if name in PEERS])
    names = [name for name in names if name in peers or name not in PEERS]
    ceilings = measure_ceilings()
    record: dict = {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "torch": torch.__version__,
        "routing": arguments.routing,
        "ceilings": ceilings,
        "errors": {},
        "shapes": {},
    }
    print(f"matmul {ceilings['matmul_flops'] / 1e12:.0f} TFLOP/s, copy {ceilings['copy_bytes'] / 1e12:.2f} TB/s")
    for name in names:
        record["errors"][name] = check(name, arguments.routing, peers)
        print(f"check {name}: { ({key: f'{error:.1e}' for key, error in record['errors'][name].items()}) }", flush=True)
    for shape_name in arguments.shapes.split(","):
        shape = SHAPES[shape_name]
        layer = make_layer(shape, arguments.routing, seed=1)
        contenders = [c for name in names if (c := make_contender(name, layer, peers)) is not None]
        results: dict = measure(contenders, layer, arguments.rounds)
        for name, result in results.items():
            report(name, shape_name, shape, layer.used, result)
        if arguments.ops:
            results["ops"] = measure_ops(BACKENDS[BackendName.cute_sm90], shape, layer, ceilings)
            fractions = {op: f"{r['ms']:.3f} ms {r['roof_fraction']:.0%}" for op, r in results["ops"].items()}
            print(f"{'':12s} {fractions}", flush=True)
        record["shapes"][shape_name] = results
        del layer, contenders
        torch.cuda.empty_cache()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "uncommitted tree"


if __name__ == "__main__":
    main()
