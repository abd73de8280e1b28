"""Times everything between a layer's input and its experts on one GPU: the kernels beside the same in plain torch.

    python -m benchmarks.routing --shapes olmoe,qwen3-30b --json OUT.json

Router: fp32 logits of bf16 inputs, weights, top-K, sums for the losses. Plan: rows, offsets and inverse index.
Backward: from the gradients of weights and losses to those of the input and the router's weight.
Before anything is timed the two paths' plans are compared, on the same probabilities. Torch's product runs in fp32 as
model/router.py's does on a CPU. ``ms`` is the median of rounds of eager calls; ``graph_ms`` replays a CUDA graph of the
same calls, which leaves the launches out and shows that nothing in them asks the host; ``launches`` lists kernels,
copies and fills with their microseconds. "and back" is a forward and a backward; what it takes beyond the forward alone
is the backward.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.options import names_of, need_gpu, output_file
from benchmarks.shapes import SHAPES, MoEShape
from benchmarks.timing import graph_of, in_turns, launches_of, new_record, write_record
from model.config import MoEConfig, RoutingConfig
from model.moe import moe_stats
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
    return _outcome(routed_by_kernels(problem))


def routed_by_kernels(problem: Problem) -> Routed:
    """Return what the model's own router says."""
    kind = RoutingKind.top_k if problem.rounding is None else RoutingKind.token_rounding
    return problem.router(problem.x_TD, routing=kind, seed=SEED, num_sequences=NUM_SEQUENCES)


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


def and_back(problem: Problem, forward: Callable[[Problem], Outcome]) -> Callable[[], object]:
    """Return a step from the input on, and from gradients of weights and sums back to those of input and weight."""
    outcome = forward(problem)
    pulls = [torch.randn_like(output) for output in (outcome.score_TE, *outcome.losses)]
    leaves = (problem.x_TD, problem.router.weight)

    def step() -> object:
        outcome = forward(problem)
        return torch.autograd.grad((outcome.score_TE, *outcome.losses), leaves, pulls)

    return step


def time_step(step: Callable[[], object], *, graph: bool = True) -> dict:
    """Return the milliseconds of one eager call and, where asked for, of a graph's replay, and the launches."""
    times = in_turns({"ms": step}, ROUNDS, ROUND_MS)
    if graph:
        times |= in_turns({"graph_ms": graph_of(step)}, ROUNDS, ROUND_MS)
    return {**times, "launches": launches_of(step)}


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
        "gradient of logits in two bf16 numbers": lambda: router.split_bf16(logits_TE),
    }
    for rule in Rounding:
        parts[f"rounding and plan, {rule.value}"] = partial(
            rounding.round_choice, *columns, K=shape.K, tile_m=TILE_M, rounding=rule, seed=SEED
        )
    return parts


def measure(shape: MoEShape, rules: list[Rounding | None], *, beside_torch: bool) -> dict[str, dict]:
    """Return the times of every part, and of both paths under each rule, forward alone and both ways."""
    results: dict[str, dict] = {}
    with torch.no_grad():
        for name, step in parts_of(shape).items():
            results[name] = time_step(step)
    paths = {"kernels": by_kernels} | ({"torch": by_torch} if beside_torch else {})
    for rule in rules:
        problem = make_problem(shape, rule)
        check(problem)
        name = "top-K" if rule is None else rule.value
        with torch.no_grad():
            routed = routed_by_kernels(problem)
            results[f"counts for the metrics, {name}"] = time_step(partial(moe_stats, routed))
        for path, forward in paths.items():
            graph = path == "kernels"
            with torch.no_grad():
                results[f"router to plan, {name}, {path}"] = time_step(partial(forward, problem), graph=graph)
            results[f"router to plan and back, {name}, {path}"] = time_step(and_back(problem, forward), graph=graph)
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="olmoe,qwen3-30b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--rules",
        type=names_of(rule.value for rule in Rounding),
        default="nearest",
        help=f"beside top-K, of {', '.join(r.value for r in Rounding)}",
    )
    parser.add_argument("--without-torch", action="store_true", help="time the kernels alone; plans are still compared")
    parser.add_argument("--json", type=output_file, help="write everything here, after every shape")
    arguments = parser.parse_args()
    need_gpu()
    rules = [None, *(Rounding(name) for name in arguments.rules)]
    record = new_record(tile_m=TILE_M, num_sequences=NUM_SEQUENCES, shapes={})
    for name in arguments.shapes:
        results = measure(SHAPES[name], rules, beside_torch=not arguments.without_torch)
        record["shapes"][name] = {"shape": SHAPES[name]._asdict(), "parts": results}
        for part, result in results.items():
            graph = f"{1e3 * result['graph_ms']:9.1f} us in a graph" if "graph_ms" in result else ""
            launches = f"{len(result['launches']):3d} launches"
            print(f"{name:14s} {part:42s} {1e3 * result['ms']:9.1f} us  {launches} {graph}", flush=True)
        write_record(record, arguments.json)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
