"""Times everything between a layer's input and its experts on one GPU: the kernels beside the same in plain torch.

    python -m benchmarks.routing --shapes olmoe,qwen3-30b --json OUT.json

Router: fp32 logits of bf16 inputs, weights, top-K, sums for the losses. Plan: rows, offsets and inverse index.
Backward: from the gradients of weights and losses to those of the input and the router's weight.
Before anything is timed the two paths' plans are compared, on the same probabilities. Torch's product runs in fp32 as
model/router.py's does on a CPU. ``ms`` is the median of rounds of eager calls; ``graph_ms`` replays a CUDA graph of the
same calls, which leaves the launches out and shows that nothing in them asks the host.
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES, MoEShape
from model.config import MoEConfig, RoutingConfig
from model.router import Routed, Router, router_sums
from moe_kernels import Rounding, RoutingKind
from moe_kernels.routing.build import plan_from_mask_torch
from moe_kernels.routing.plan import row_capacity
from moe_kernels.routing.token_rounding import token_rounding_torch
from moe_kernels.routing.top_k import top_k_mask

TILE_M = 128
NUM_SEQUENCES = 8
ROUNDS = 5
ROUND_MS = 10.0  # of work per round
SEED = 7
PLAN_FIELDS = ("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R")


class Problem(NamedTuple):
    """One layer's router and its input; a rule of None is plain top-K."""

    router: Router
    x_TD: Tensor
    K: int
    rounding: Rounding | None


class Outcome(NamedTuple):
    """What either path hands on, as far as the other must agree."""

    score_TE: Tensor
    keep_TE: Tensor
    plan: tuple[Tensor, ...]
    losses: tuple[Tensor, Tensor]  # differentiable: probability sums per sequence and z sum


def make_problem(shape: MoEShape, rounding: Rounding | None) -> Problem:
    """Return a router with logits of unit variance and weights normalised over the top K."""
    routing = RoutingConfig(tile_m=TILE_M, rounding=rounding or Rounding.nearest)
    config = MoEConfig(
        num_experts=shape.E,
        experts_per_token=shape.K,
        expert_width=shape.N,
        normalize_top_k=True,
        routing=routing,
    )
    generator = torch.Generator("cuda").manual_seed(1)
    router = Router(config, width=shape.D).cuda().bfloat16()
    with torch.no_grad():
        router.weight.normal_(std=shape.D**-0.5, generator=generator)
    x_TD = torch.randn(shape.T, shape.D, device="cuda", generator=generator, dtype=torch.bfloat16)
    return Problem(router, x_TD.requires_grad_(), shape.K, rounding)


def by_kernels(problem: Problem) -> Outcome:
    """Return the outcome of the model's own router."""
    kind = RoutingKind.top_k if problem.rounding is None else RoutingKind.token_rounding
    routed = problem.router(problem.x_TD, routing=kind, seed=SEED, num_sequences=NUM_SEQUENCES)
    return _outcome(routed)


def _outcome(routed: Routed) -> Outcome:
    plan = tuple(getattr(routed.routing.plan, name) for name in PLAN_FIELDS)
    return Outcome(routed.score_TE, routed.routing.keep_TE, plan, (routed.sums.prob_sum_BE, routed.sums.z_sum))


def by_torch(problem: Problem) -> Outcome:
    """Return the same in plain torch, with an fp32 product."""
    router, K = problem.router, problem.K
    logits_TE = problem.x_TD.float() @ router.weight.float().T
    prob_TE = logits_TE.softmax(dim=-1)
    mask_TE, keep_TE, plan = torch_plan(prob_TE.detach(), K, problem.rounding)
    score_TE = prob_TE / (prob_TE * mask_TE).sum(dim=-1, keepdim=True)
    sums = router_sums(logits_TE, prob_TE, mask_TE, num_sequences=NUM_SEQUENCES)
    return Outcome(score_TE, keep_TE, plan, (sums.prob_sum_BE, sums.z_sum))


def torch_plan(prob_TE: Tensor, K: int, rounding: Rounding | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (top-K mask, keep mask, plan) by the torch builders."""
    T, E = prob_TE.shape
    if rounding is None:
        mask_TE = keep_TE = top_k_mask(prob_TE, K)
        plan = plan_from_mask_torch(mask_TE, R=row_capacity(RoutingKind.top_k, T=T, E=E, K=K, tile_m=1))
    else:
        routing = token_rounding_torch(prob_TE, K, tile_m=TILE_M, rounding=rounding, bias_E=None, seed=SEED)
        mask_TE, keep_TE, plan = routing.top_k_mask_TE, routing.keep_TE, routing.plan
    return mask_TE, keep_TE, tuple(getattr(plan, name) for name in PLAN_FIELDS)


def check(problem: Problem) -> None:
    """Raise ``AssertionError`` unless the kernels' plan is the torch builders' for the kernels' own probabilities."""
    from moe_kernels.triton.router import weigh_and_choose  # noqa: PLC0415 - not on machines without a GPU

    outcome = by_kernels(problem)
    logits_TE = torch.mm(problem.x_TD.detach(), problem.router.weight.detach().T, out_dtype=torch.float32)
    options = {"num_sequences": 1, "sigmoid": False, "normalize": True, "scale": 1.0, "transposed": True}
    weighed = weigh_and_choose(logits_TE, None, K=problem.K, **options)
    _, keep_TE, plan = torch_plan(weighed.prob_ET.t().contiguous(), problem.K, problem.rounding)
    assert torch.equal(outcome.keep_TE, keep_TE), f"{problem.rounding}: other pairs are kept"
    for name, actual, expected in zip(PLAN_FIELDS, outcome.plan, plan, strict=True):
        assert torch.equal(actual, expected), f"{problem.rounding}: {name} differs"


def backward_of(problem: Problem, outcome: Outcome) -> Callable[[], object]:
    """Return a step from gradients of weights, probability sums and z sum to those of the input and the weight."""
    outputs = (outcome.score_TE, *outcome.losses)
    pulls = [torch.randn_like(output) for output in outputs]
    leaves = (problem.x_TD, problem.router.weight)
    return lambda: torch.autograd.grad(outputs, leaves, pulls, retain_graph=True)


def time_ms(step: Callable[[], object]) -> float:
    """Return the median milliseconds of one call."""
    for _ in range(3):
        step()
    repeats = max(3, round(ROUND_MS / _time(step, 3)))
    return sorted(_time(step, repeats) for _ in range(ROUNDS))[ROUNDS // 2]


def _time(step: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def graph_of(step: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of ``step``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def parts_of(shape: MoEShape) -> dict[str, Callable[[], object]]:
    """Return the parts of our own path as steps of their own; all but the first two begin at the choice."""
    from moe_kernels.triton import plan, rounding, router  # noqa: PLC0415 - not on machines without a GPU

    problem = make_problem(shape, None)
    x_TD, weight_ED = problem.x_TD.detach(), problem.router.weight.detach()
    logits_TE = torch.mm(x_TD, weight_ED.T, out_dtype=torch.float32)

    def weigh(*, transposed: bool) -> router.RoutedTensors:
        return router.weigh_and_choose(
            logits_TE,
            None,
            K=shape.K,
            num_sequences=NUM_SEQUENCES,
            sigmoid=False,
            normalize=True,
            scale=1.0,
            transposed=transposed,
        )

    chosen = weigh(transposed=True)
    count_E = chosen.top_k_count_BE.sum(0)
    columns = (chosen.prob_ET, chosen.top_k_mask_TE, chosen.top_k_mask_ET, count_E)
    parts: dict[str, Callable[[], object]] = {
        "product": lambda: torch.mm(x_TD, weight_ED.T, out_dtype=torch.float32),
        "weigh and choose": lambda: weigh(transposed=False),
        "the same, transposed too": lambda: weigh(transposed=True),
        "plan": lambda: plan.plan_from_mask(chosen.top_k_mask_TE, R=shape.T * shape.K),
    }
    for rule in Rounding:
        parts[f"rounding and plan, {rule.value}"] = partial(
            rounding.round_choice, *columns, K=shape.K, tile_m=TILE_M, rounding=rule, seed=SEED
        )
    return parts


def measure(shape: MoEShape, rules: list[Rounding | None]) -> dict[str, dict]:
    """Return the milliseconds of every part, and of forward and backward of both paths under each rule."""
    results: dict[str, dict] = {}
    with torch.no_grad():
        for name, step in parts_of(shape).items():
            results[name] = {"ms": time_ms(step), "graph_ms": time_ms(graph_of(step))}
    for rule in rules:
        problem = make_problem(shape, rule)
        check(problem)
        name = "top-K" if rule is None else rule.value
        for path, forward in (("kernels", by_kernels), ("torch", by_torch)):
            step = partial(forward, problem)
            with torch.no_grad():
                result = {"ms": time_ms(step)}
                if path == "kernels":
                    result["graph_ms"] = time_ms(graph_of(step))
            if rule is None:
                results[f"backward, {path}"] = {"ms": time_ms(backward_of(problem, step()))}
            results[f"router to plan, {name}, {path}"] = result
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="olmoe,qwen3-30b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rules", default="nearest", help=f"beside top-K, of {', '.join(r.value for r in Rounding)}")
    parser.add_argument("--json", type=Path, help="write everything here, after every shape")
    arguments = parser.parse_args()
    rules = [None, *(Rounding(name) for name in arguments.rules.split(","))]
    record: dict = {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "tile_m": TILE_M,
        "num_sequences": NUM_SEQUENCES,
        "shapes": {},
    }
    for name in arguments.shapes.split(","):
        results = measure(SHAPES[name], rules)
        record["shapes"][name] = {"shape": SHAPES[name]._asdict(), "parts": results}
        for part, result in results.items():
            graph = f"{1e3 * result['graph_ms']:9.1f} us in a graph" if "graph_ms" in result else ""
            print(f"{name:10s} {part:38s} {1e3 * result['ms']:9.1f} us {graph}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
