"""What tests and benchmarks of routed experts share: error rules, routings worth trying, and poisoned memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.routing.expert_choice import route_expert_choice
from moe_kernels.routing.kinds import Rounding
from moe_kernels.routing.plan import Routing, RoutingPlan
from moe_kernels.routing.token_rounding import route_token_rounding
from moe_kernels.routing.top_k import route_top_k


def assert_as_good_as(actual: Tensor, baseline: Tensor, truth: Tensor, *, factor: float = 2.0) -> None:
    """Fail if ``actual`` is more than ``factor`` times as far from ``truth`` as ``baseline`` is, in the largest error.

    ``truth`` is fp64 on the same rounded inputs; ``baseline`` is plain PyTorch in the dtype of ``actual``. One rounding
    of the largest value is allowed on top. Source: the rule of flash-attention's test suite.
    """
    _assert_same_kind(actual, truth)
    error = (actual.double() - truth).abs().max().item()
    floor = torch.finfo(actual.dtype).eps * truth.abs().max().item()
    allowed = factor * (baseline.double() - truth).abs().max().item() + floor
    assert error <= allowed, (
        f"max error {error:.3e} > {allowed:.3e} ({factor} x the error of PyTorch in {baseline.dtype})"
    )


def assert_norm_close(actual: Tensor, truth: Tensor, tolerance: float) -> None:
    """Fail if ‖actual - truth‖ > tolerance · ‖truth‖; where ``truth`` is zero ``actual`` must be too."""
    _assert_same_kind(actual, truth)
    error, norm = (actual.double() - truth.double()).norm().item(), truth.double().norm().item()
    assert error <= tolerance * norm, f"‖error‖ {error:.3e} > {tolerance:.1e} of {norm:.3e}"


class LayerTensors(NamedTuple):
    """The differentiable arguments of ``moe_experts``, in its order."""

    x_TD: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    score_TE: Tensor


def random_layer(
    prob_TE: Tensor, *, D: int, N: int, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu"
) -> LayerTensors:
    """Return leaves that require gradients, scaled to give outputs of order one; ``prob_TE`` weighs the pairs."""
    T, E = prob_TE.shape
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, scale: float) -> Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(device, dtype).requires_grad_()

    score_dtype = torch.promote_types(dtype, torch.float32)
    return LayerTensors(
        x_TD=leaf(T, D, scale=1.0),
        w_gate_up=leaf(E, 2 * N, D, scale=D**-0.5),
        w_down=leaf(E, D, N, scale=N**-0.5),
        score_TE=prob_TE.detach().to(device, score_dtype).clone().requires_grad_(),
    )


def random_probs(T: int, E: int, *, seed: int, skew: float = 1.0) -> Tensor:
    """Return fp32 router probabilities (T, E); the larger ``skew``, the more tokens prefer the same experts."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(T, E, generator=generator) + skew * torch.randn(E, generator=generator)
    return logits_TE.softmax(dim=-1)


def probs_with_counts(counts: list[int], *, seed: int) -> Tensor:
    """Return fp32 probabilities whose top-1 choice gives expert e exactly ``counts[e]`` of T = sum(counts) tokens."""
    generator = torch.Generator().manual_seed(seed)
    expert_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expert_T = expert_T[torch.randperm(len(expert_T), generator=generator)]
    logits_TE = torch.rand(len(expert_T), len(counts), generator=generator)
    logits_TE[torch.arange(len(expert_T)), expert_T] += 1.0
    return logits_TE.softmax(dim=-1)


def plan_on(plan: RoutingPlan, device: torch.device | str) -> RoutingPlan:
    """Return ``plan`` with its tensors on ``device``."""
    tensors = {f.name: getattr(plan, f.name) for f in fields(plan) if torch.is_tensor(getattr(plan, f.name))}
    return replace(plan, **{name: tensor.to(device) for name, tensor in tensors.items()})


class EdgeCase(NamedTuple):
    """A routing that has broken kernels before, with the probabilities that weigh its pairs."""

    name: str
    prob_TE: Tensor
    routing: Routing

    @property
    def plan(self) -> RoutingPlan:
        """The plan under test."""
        return self.routing.plan


def edge_cases() -> list[EdgeCase]:
    """Return the edges that every backend must pass: counts around a tile, none, all, ties, tails, unused rows."""
    around_a_tile = probs_with_counts([0, 1, 127, 128, 129], seed=0)
    all_to_one = probs_with_counts([0, 75, 0], seed=1)
    odd = random_probs(101, 7, seed=2)
    few = random_probs(5, 4, seed=3)
    equal = torch.full((40, 6), 1 / 6)

    def rounded(prob_TE: Tensor, K: int, tile_m: int, rounding: Rounding) -> Routing:
        return route_token_rounding(prob_TE, K, tile_m=tile_m, rounding=rounding)

    cases = {
        "counts 0, 1, 127, 128, 129": (around_a_tile, route_top_k(around_a_tile, 1)),
        "counts around a tile, rounded up": (around_a_tile, rounded(around_a_tile, 1, 128, Rounding.up)),
        "counts around a tile, rounded down": (around_a_tile, rounded(around_a_tile, 1, 128, Rounding.down)),
        "all tokens to one expert": (all_to_one, route_top_k(all_to_one, 1)),
        "all tokens to one expert, clamped": (all_to_one, rounded(all_to_one, 1, 32, Rounding.up)),
        "T multiple of nothing, unused rows": (odd, rounded(odd, 2, 16, Rounding.nearest)),
        "K = 1": (odd, route_top_k(odd, 1)),
        "K = E": (odd, route_top_k(odd, 7)),
        "K = E, rounded down": (odd, rounded(odd, 7, 16, Rounding.down)),
        "T below a tile: nothing kept": (few, rounded(few, 2, 8, Rounding.up)),
        "one token": (few[:1], route_top_k(few[:1], 2)),
        "no rows allocated": (few[:1], route_expert_choice(few[:1], 2)),
        "equal probabilities": (equal, rounded(equal, 2, 8, Rounding.nearest)),
    }
    return [EdgeCase(name, prob_TE, routing) for name, (prob_TE, routing) in cases.items()]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that torch allocates without a value with NaN (integers: their largest) while it lasts."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic
    was_filling = filling.fill_uninitialized_memory  # type: ignore[attr-defined]  # a property of the module
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        filling.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]


@contextmanager
def saved_for_backward() -> Iterator[dict[int, int]]:
    """Yield the bytes of every storage, by its address, that autograd saves while it lasts."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _assert_same_kind(actual: Tensor, truth: Tensor) -> None:
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert bool(actual.isfinite().all()), "not finite"
