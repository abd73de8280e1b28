"""The whole layer, from its input and its router's weight through router, plan and experts and back, as contenders.

``--with-routing`` of benchmarks.moe_layer. Ours stands in it four times: with top-K and with token rounding (nearest),
each once from the input on ("top_k", "nearest") and once with plan and scores given ("... experts"): the second pair is
how the paper counts rounding's gain, the first is what a training step feels. Ours carries the gradients of a balance
loss and a z-loss through the router; sonic-moe's layer is called without the auxiliary loss that its module adds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_inputs import Inputs, make_inputs
from benchmarks.peers import interleave, sonicmoe_layer
from benchmarks.shapes import MoEShape
from benchmarks.timing import Outlasted, first_call_s, host_ms, in_turns, time_limit
from model.config import MoEConfig, RoutingConfig
from model.router import Routed, Router
from moe_kernels import Backend, BackendName, Rounding, RoutingKind, RoutingPlan, moe_experts, route_top_k
from moe_kernels.dispatch import BACKENDS

CHECK_SHAPE = MoEShape(T=1000, D=256, N=128, E=16, K=4)
# Relative Frobenius error. Results in bf16 are good to 4e-3; bf16 logits, which sonic-moe has, move a logit of 4 by
# 2^-8 and its weight by as much, and the gradient of a softmax is a difference of such numbers.
CHECK_TOLERANCE = 4e-2
NUM_SEQUENCES = 8
TILE_M = 128
KINDS = {"top_k": RoutingKind.top_k, "nearest": RoutingKind.token_rounding}


class Contender(NamedTuple):
    """A forward over leaves of its own, and the gradients that are pulled back through its outputs."""

    leaves: tuple[Tensor, ...]
    forward: Callable[[], tuple[Tensor, ...]]
    pulls: tuple[Tensor, ...]

    def both(self) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves after a forward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.pulls)


def make_router(shape: MoEShape, weight_ED: Tensor) -> Router:
    """Return the model's router with ``weight_ED``, which normalises weights over the top K, as sonic-moe's does."""
    config = MoEConfig(
        num_experts=shape.E,
        experts_per_token=shape.K,
        expert_width=shape.N,
        normalize_top_k=True,
        routing=RoutingConfig(tile_m=TILE_M, rounding=Rounding.nearest),
    )
    router = Router(config, width=shape.D).to(weight_ED.device, weight_ED.dtype)
    with torch.no_grad():
        router.weight.copy_(weight_ED)
    return router


def route(router: Router, x_TD: Tensor, kind: RoutingKind) -> Routed:
    """Return the router's answer for tokens of as many sequences as divide them, at most 8."""
    num_sequences = next(n for n in (NUM_SEQUENCES, 4, 2, 1) if x_TD.shape[0] % n == 0)
    return router(x_TD, routing=kind, seed=None, num_sequences=num_sequences)


def ours(shape: MoEShape, inputs: Inputs, kind: RoutingKind, backend: Backend) -> Contender:
    """Return the model's router and our experts as a contender."""
    router = make_router(shape, inputs.router_ED)
    leaves = (_leaf(inputs.x_TD), router.weight, _leaf(inputs.w_gate_up), _leaf(inputs.w_down))

    def forward() -> tuple[Tensor, ...]:
        x_TD, _, w_gate_up, w_down = leaves
        routed = route(router, x_TD, kind)
        out_TD = moe_experts(x_TD, w_gate_up, w_down, routed.score_TE, routed.routing.plan, backend=backend)
        return out_TD, routed.sums.prob_sum_BE, routed.sums.z_sum

    with torch.no_grad():
        sums = route(router, inputs.x_TD, kind).sums
    # A balance loss weighs probability sums by loads; of a mean over tokens its gradient is small beside the output's.
    dprob_sum_BE = sums.top_k_count_BE.float() / (shape.T * shape.T)
    return Contender(leaves, forward, (inputs.dout_TD, dprob_sum_BE, torch.full_like(sums.z_sum, 1e-3 / shape.T)))


def ours_experts(shape: MoEShape, inputs: Inputs, kind: RoutingKind, backend: Backend) -> Contender:
    """Return our experts alone, with plan and scores of the model's router given."""
    with torch.no_grad():
        routed = route(make_router(shape, inputs.router_ED), inputs.x_TD, kind)
    leaves = tuple(map(_leaf, (inputs.x_TD, inputs.w_gate_up, inputs.w_down, routed.score_TE)))
    plan = routed.routing.plan
    return Contender(leaves, lambda: (moe_experts(*leaves, plan, backend=backend),), (inputs.dout_TD,))


def sonicmoe(shape: MoEShape, inputs: Inputs) -> Contender:
    """Return sonic-moe's router and experts as a contender."""
    weights = (inputs.router_ED, interleave(inputs.w_gate_up), inputs.w_down)
    leaves = tuple(map(_leaf, (inputs.x_TD, *weights)))
    return Contender(leaves, lambda: (sonicmoe_layer(*leaves, K=shape.K),), (inputs.dout_TD,))


def contenders(shape: MoEShape, inputs: Inputs, names: list[str]) -> dict[str, Contender]:
    """Return the contenders of ``names`` (backends, and sonicmoe) by what the results call them."""
    found = {}
    for name in names:
        if name == "sonicmoe":
            found[name] = sonicmoe(shape, inputs)
            continue
        backend = BACKENDS[BackendName(name)]
        for label, kind in KINDS.items():
            found[f"{name} {label}"] = ours(shape, inputs, kind, backend)
            found[f"{name} {label} experts"] = ours_experts(shape, inputs, kind, backend)
    return found


def check(names: list[str], *, peer_limit_s: float = 0.0, device: str = "cuda") -> dict[str, dict[str, float]]:
    """Return relative errors of output and gradients of every whole layer against fp32 with the same choice.

    A peer that outlasts its time has ``outlasted_s`` instead. Raises: AssertionError if an error is too large, or not a
    number.
    """
    inputs = make_inputs(CHECK_SHAPE, "uniform", seed=0, device=device)
    errors: dict[str, dict[str, float]] = {}
    for name, contender in contenders(CHECK_SHAPE, inputs, names).items():
        if name.endswith("experts"):  # checked as part of the whole
            continue
        try:
            with time_limit(peer_limit_s if name == "sonicmoe" else 0.0):
                errors[name] = _errors(name, contender, inputs)
        except Outlasted:
            errors[name] = {"outlasted_s": peer_limit_s}
            continue
        assert all(error < CHECK_TOLERANCE for error in errors[name].values()), f"{name} is wrong: {errors[name]}"
    return errors


def _errors(name: str, contender: Contender, inputs: Inputs) -> dict[str, float]:
    out_TD = contender.forward()[0]
    actual = (out_TD, *torch.autograd.grad(out_TD, contender.leaves, inputs.dout_TD))
    expected = _truth(inputs, *_choice(inputs, None if name == "sonicmoe" else KINDS[name.split()[1]]))
    if name == "sonicmoe":
        expected = (*expected[:3], interleave(expected[3]), expected[4])
    labels = ("out", "dx", "drouter", "dw_gate_up", "dw_down")
    return {
        label: ((a.float() - t).norm() / t.norm()).item() for label, a, t in zip(labels, actual, expected, strict=True)
    }


def _choice(inputs: Inputs, kind: RoutingKind | None) -> tuple[Tensor, RoutingPlan]:
    """Return the top-K mask and the plan that the model's router makes or, for None, those of logits in bf16."""
    with torch.no_grad():
        if kind is None:
            routing = route_top_k(F.linear(inputs.x_TD, inputs.router_ED), CHECK_SHAPE.K)
        else:
            routing = route(make_router(CHECK_SHAPE, inputs.router_ED), inputs.x_TD, kind).routing
    return routing.top_k_mask_TE, routing.plan


def _truth(inputs: Inputs, mask_TE: Tensor, plan: RoutingPlan) -> tuple[Tensor, ...]:
    """Return the output of the layer and the gradients of x, router and both weights, in fp32."""
    leaves = [tensor.float().requires_grad_() for tensor in inputs[:4]]
    x_TD, router_ED, w_gate_up, w_down = leaves
    prob_TE = (x_TD @ router_ED.T).softmax(-1)
    score_TE = prob_TE / (prob_TE * mask_TE).sum(-1, keepdim=True)
    out_TD = moe_experts(x_TD, w_gate_up, w_down, score_TE, plan, backend=BACKENDS[BackendName.reference])
    return out_TD, *torch.autograd.grad(out_TD, leaves, inputs.dout_TD.float())


def measure(shape: MoEShape, routing: str, names: list[str], *, rounds: int, peer_limit_s: float) -> dict:
    """Return milliseconds of every contender, forward and both ways, and what follows from them."""
    inputs = make_inputs(shape, routing, seed=1)
    running = contenders(shape, inputs, names)
    results: dict[str, dict] = {}
    for name, contender in list(running.items()):
        try:
            with time_limit(peer_limit_s if name == "sonicmoe" else 0.0):
                results[name] = {"first_call_s": first_call_s(contender.both)}
        except Outlasted:
            print(f"{name}: its first call outlasted {peer_limit_s:.0f} s, left out", flush=True)
            results[name] = {"outlasted_s": peer_limit_s}
            del running[name]
    for way in ("forward", "both"):
        steps = {name: getattr(contender, way) for name, contender in running.items()}
        for name, ms in in_turns(steps, rounds).items():
            results[name][f"{way}_ms"] = ms
    for name, contender in running.items():
        results[name]["host_both_ms"] = host_ms(contender.both)
    return {
        "shape": shape._asdict(),
        "contenders": results,
        "tiles": {label: count_tiles(_plan_of(shape, inputs, kind)) for label, kind in KINDS.items()},
        "ratios": {name: ratios(results, name) for name in names if name != "sonicmoe"},
    }


def _plan_of(shape: MoEShape, inputs: Inputs, kind: RoutingKind) -> RoutingPlan:
    with torch.no_grad():
        return route(make_router(shape, inputs.router_ED), inputs.x_TD, kind).routing.plan


def count_tiles(plan: RoutingPlan) -> dict[str, float]:
    """Return the rows in use, the tiles that they take, and the share of those tiles' rows that holds nothing."""
    count_E = plan.expert_offsets_E1.diff()
    tiles, rows = int(((count_E + TILE_M - 1) // TILE_M).sum()), int(count_E.sum())
    return {"rows": rows, "tiles": tiles, "unused_fraction": 1 - rows / (tiles * TILE_M) if tiles else 0.0}


def ratios(results: dict[str, dict], name: str) -> dict[str, float]:
    """Return routing's share of the layer and rounding's gain, with and without routing, of our backend ``name``."""
    top_k, nearest = results[f"{name} top_k"], results[f"{name} nearest"]
    top_k_experts, nearest_experts = results[f"{name} top_k experts"], results[f"{name} nearest experts"]
    found = {
        "routing_share_of_forward": 1 - top_k_experts["forward_ms"] / top_k["forward_ms"],
        "routing_share_of_both": 1 - top_k_experts["both_ms"] / top_k["both_ms"],
        "rounding_gain_forward": top_k["forward_ms"] / nearest["forward_ms"],
        "rounding_gain_both": top_k["both_ms"] / nearest["both_ms"],
        "rounding_gain_both_without_routing": top_k_experts["both_ms"] / nearest_experts["both_ms"],
    }
    peer = results.get("sonicmoe", {})
    if "both_ms" in peer:
        found["over_sonicmoe_forward"] = peer["forward_ms"] / top_k["forward_ms"]
        found["over_sonicmoe_both"] = peer["both_ms"] / top_k["both_ms"]
    return found


def report(shape_name: str, result: dict) -> None:
    """Print a result's lines."""
    for name, times in result["contenders"].items():
        if "both_ms" in times:
            print(
                f"{shape_name:14s} {name:26s} forward {times['forward_ms']:8.3f} ms  both {times['both_ms']:8.3f} ms"
                f"  host {times['host_both_ms']:6.3f} ms  first call {times['first_call_s']:5.1f} s",
                flush=True,
            )
    for label, tiles in result["tiles"].items():
        print(
            f"{'':14s} {label}: {tiles['rows']} rows in {tiles['tiles']} tiles, {tiles['unused_fraction']:.1%} unused"
        )
    for name, found in result["ratios"].items():
        print(f"{'':14s} {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
