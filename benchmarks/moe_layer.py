"""Times the routed experts, forward and backward, on one GPU: our backends and, side by side in one process, peers.

    python -m benchmarks.moe_layer --shapes olmoe,7b-n256 --routing uniform --backends cute_sm90,sonicmoe --json F
    python -m benchmarks.moe_layer --with-routing --shapes olmoe,sparse-d4096 --backends cute_sm90,sonicmoe --json F
    python -m benchmarks.moe_layer --cold-start --shapes olmoe --json F

Every contender is checked against fp32 on a small layer before anything is timed. Rounds go through the contenders in
turn, because a card under load changes its clocks; what is printed is each one's median round. Backward is forward and
backward less forward, and host what the host takes to queue a forward. TFLOP/s count 6 and 12 · rows · D · N. Router
and plan are given (sonic-moe builds its own metadata in its time); with ``--with-routing`` (whole_layer.py) they are
part of what is timed. ``--cold-start`` (cold_start.py) times first steps. Roof fractions (``--ops``, roof.py) divide
the least time an op could take, at the rates of a large matrix product and of a large copy measured in the same
process, by its time.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import cold_start, whole_layer
from benchmarks.options import at_least, names_of, need_backends, need_gpu, output_file
from benchmarks.peers import PEERS, available, interleave
from benchmarks.roof import measure_ceilings, measure_ops
from benchmarks.shapes import SHAPES, MoEShape
from benchmarks.timing import Outlasted, first_call_s, host_ms, in_turns, new_record, time_limit, write_record
from moe_kernels import BackendName, RoutingPlan, moe_experts, route_token_rounding, route_top_k
from moe_kernels.dispatch import BACKENDS
from moe_kernels.routing.kinds import Rounding

CONTENDERS = [*(name.value for name in BACKENDS), *PEERS]
CHECK_SHAPE = MoEShape(T=1000, D=256, N=128, E=16, K=4)
CHECK_TOLERANCE = 1e-2  # relative Frobenius error of bf16 results: one rounding of the largest chain is 4e-3
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


def make_layer(shape: MoEShape, routing: str, seed: int, device: str = "cuda") -> Layer:
    """Return random inputs of unit scale, routed uniformly, by Zipf(1.2) loads, or uniformly with token rounding."""
    T, D, N, E, K = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, device=device, generator=generator, dtype=torch.bfloat16) * scale

    logits_TE = torch.randn(T, E, device=device, generator=generator)
    if routing == "zipf":
        popularity_E = torch.arange(1, E + 1, device=device).float().log() * -1.2
        gumbel_TE = -torch.empty(T, E, device=device).exponential_(generator=generator).log()
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
    """A forward over leaves of its own, in its own layout; the second and third are the weights."""

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


def measure(contenders: list[Contender], layer: Layer, rounds: int, peer_limit_s: float) -> dict[str, dict]:
    """Return each contender's cold start, held and peak bytes, and median forward and backward milliseconds.

    ``forward_host_ms`` is the host's time for a forward's launches. A peer whose first call takes more than
    ``peer_limit_s`` (0: no limit) is left out, and the result says so.
    """
    results: dict[str, dict] = {}
    steps: dict[str, dict[str, Callable]] = {"forward": {}, "both": {}}
    for contender in contenders:

        def both(contender: Contender = contender) -> None:
            torch.autograd.grad(contender.forward(), contender.leaves, layer.dout_TD)

        try:
            with time_limit(peer_limit_s if contender.name in PEERS else 0.0):
                cold_start_s = first_call_s(both)
        except Outlasted:
            print(f"{contender.name}: its first call outlasted {peer_limit_s:.0f} s, left out", flush=True)
            results[contender.name] = {"outlasted_s": peer_limit_s}
            continue
        results[contender.name] = {"cold_start_s": cold_start_s, **_memory(contender, layer)}
        results[contender.name]["forward_host_ms"] = host_ms(contender.forward)
        steps["forward"][contender.name], steps["both"][contender.name] = contender.forward, both
    for way, by_name in steps.items():
        for name, ms in in_turns(by_name, rounds).items():
            results[name][f"{way}_ms"] = ms
    for name in steps["both"]:
        results[name]["backward_ms"] = results[name].pop("both_ms") - results[name]["forward_ms"]
    return results


def _memory(contender: Contender, layer: Layer) -> dict[str, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out_TD = contender.forward()
    held = torch.cuda.memory_allocated() - before - out_TD.numel() * out_TD.element_size()
    torch.autograd.grad(out_TD, contender.leaves, layer.dout_TD)
    return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def report(name: str, shape_name: str, shape: MoEShape, rows: int, result: dict) -> None:
    """Add rates to ``result`` and print its line."""
    if "outlasted_s" in result:
        return
    flops = 6 * rows * shape.D * shape.N
    result["forward_tflops"] = flops / result["forward_ms"] / 1e9
    result["backward_tflops"] = 2 * flops / result["backward_ms"] / 1e9
    print(
        f"{shape_name:12s} {name:10s} forward {result['forward_ms']:8.3f} ms {result['forward_tflops']:4.0f} TF"
        f"  backward {result['backward_ms']:8.3f} ms {result['backward_tflops']:4.0f} TF"
        f"  held {result['held_bytes'] / 2**20:6.0f} peak {result['peak_bytes'] / 2**20:6.0f} MiB"
        f"  cold {result['cold_start_s']:.1f} s  host {result['forward_host_ms']:.2f} ms",
        flush=True,
    )


def experts_alone(arguments: argparse.Namespace, names: list[str], peers: dict, record: dict) -> None:
    """Check and time the routed experts of every shape, with router and plan given; fill and write ``record``."""
    ceilings = record["ceilings"] = measure_ceilings()
    print(f"matmul {ceilings['matmul_flops'] / 1e12:.0f} TFLOP/s, copy {ceilings['copy_bytes'] / 1e12:.2f} TB/s")
    for name in list(names):
        try:
            with time_limit(arguments.peer_limit_s if name in PEERS else 0.0):
                record["errors"][name] = check(name, arguments.routing, peers)
        except Outlasted:
            record["errors"][name] = {"outlasted_s": arguments.peer_limit_s}
            names.remove(name)
        print(f"check {name}: { ({key: f'{error:.1e}' for key, error in record['errors'][name].items()}) }", flush=True)
    for shape_name in arguments.shapes:
        shape = SHAPES[shape_name]
        layer = make_layer(shape, arguments.routing, seed=1)
        contenders = [c for name in names if (c := make_contender(name, layer, peers)) is not None]
        results: dict = measure(contenders, layer, arguments.rounds, arguments.peer_limit_s)
        for name, result in results.items():
            report(name, shape_name, shape, layer.used, result)
        if arguments.ops:
            inputs = (layer.x_TD, layer.w_gate_up, layer.w_down, layer.dout_TD)
            backend = BACKENDS[BackendName.cute_sm90]
            results["ops"] = measure_ops(backend, shape, inputs, layer.plan, layer.used, ceilings)
            fractions = {op: f"{r['ms']:.3f} ms {r['roof_fraction']:.0%}" for op, r in results["ops"].items()}
            print(f"{'':12s} {fractions}", flush=True)
        record["shapes"][shape_name] = results
        write_record(record, arguments.json)
        del layer, contenders
        torch.cuda.empty_cache()


def with_routing(arguments: argparse.Namespace, names: list[str], record: dict) -> None:
    """Check and time the whole layer of every shape, from its input on; fill and write ``record``."""
    record["errors"] = whole_layer.check(names, peer_limit_s=arguments.peer_limit_s)
    names = [name for name in names if "outlasted_s" not in record["errors"].get(name, {})]
    print({name: {key: f"{e:.1e}" for key, e in errors.items()} for name, errors in record["errors"].items()})
    for shape_name in arguments.shapes:
        result = record["shapes"][shape_name] = whole_layer.measure(
            SHAPES[shape_name],
            arguments.routing,
            names,
            rounds=arguments.rounds,
            peer_limit_s=arguments.peer_limit_s,
        )
        whole_layer.report(shape_name, result)
        write_record(record, arguments.json)
        torch.cuda.empty_cache()


def first_steps(arguments: argparse.Namespace, names: list[str], record: dict) -> None:
    """Time the first step of fresh processes for every shape; fill and write ``record``."""
    for shape_name in arguments.shapes:
        for name in names:
            found = cold_start.cold_and_warm(shape_name, name)
            record["shapes"].setdefault(shape_name, {})[name] = found
            cold_start.report(f"{shape_name} {name}", found)
            write_record(record, arguments.json)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=names_of(SHAPES), default="7b-n256,olmoe,qwen3-30b", help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument("--routing", choices=["uniform", "zipf", "rounded"], default="uniform")
    parser.add_argument(
        "--backends", type=names_of(CONTENDERS), default="cute_sm90", help=f"backends, and peers: {', '.join(PEERS)}"
    )
    parser.add_argument("--with-routing", action="store_true", help="the whole layer, with and without rounding")
    parser.add_argument("--cold-start", action="store_true", help="the first step of fresh processes, in seconds")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--ops", action="store_true", help="time the ops of cute_sm90 one by one too")
    parser.add_argument(
        "--peer-limit-s",
        type=at_least(0, float),
        default=0.0,
        help="leave out a peer whose first call takes more; 0: wait",
    )
    parser.add_argument("--json", type=output_file, help="write everything here, after every shape")
    arguments = parser.parse_args()
    names = arguments.backends
    others = set(names) & set(PEERS)
    if arguments.with_routing and (others - {"sonicmoe"} or arguments.routing == "rounded"):
        parser.error("--with-routing times uniform or zipf loads, of backends and sonicmoe: both are rounded there")
    if arguments.cold_start and (others or arguments.with_routing or arguments.routing != "uniform"):
        parser.error("--cold-start times the whole layer of backends alone, from uniform loads, with token rounding")
    if arguments.ops and (arguments.cold_start or arguments.with_routing):
        parser.error("--ops times the ops of the experts alone: without --cold-start and --with-routing")
    if arguments.routing == "rounded" and others == set(names):
        parser.error(f"--routing rounded: {', '.join(names)} take top-K routing only; add a backend")
    need_gpu()
    ours = [name for name in names if name not in PEERS] + ["cute_sm90"] * arguments.ops
    need_backends(ours, [SHAPES[name] for name in arguments.shapes])
    names, peers = available(names)
    if not names:
        sys.exit(f"error: none of --backends {','.join(arguments.backends)} is there to be measured")
    record = new_record(routing=arguments.routing, errors={}, shapes={})
    if arguments.cold_start:
        first_steps(arguments, names, record)
    elif arguments.with_routing:
        with_routing(arguments, names, record)
    else:
        experts_alone(arguments, names, peers, record)


if __name__ == "__main__":
    main()
