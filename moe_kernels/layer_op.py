"""The expert layer as two opaque operators, forward and backward, written once over a backend's five ops.

Opaque and with fakes, so that torch.compile traces through in every dtype; arguments are flat because operators take
tensors and not plans. What is saved for backward is decided here and is the same for every backend: x, h, the rows'
scores and the plan, besides the parameters. Argument checks are in api.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_kernels.dispatch import BACKENDS, Backend, BackendName
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.side import GatheredSide

_PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class ExpertGrads(NamedTuple):
    """One field per differentiable argument, in the operator's order; None where no gradient is needed."""

    x_TD: Tensor | None
    w_gate_up: Tensor | None
    w_down: Tensor | None
    score_TE: Tensor | None


@torch.library.custom_op("gristmill::moe_experts_fwd", mutates_args=())
def moe_experts_fwd(
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    score_TE: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out_TD, h_R2N and score_R; the last two are for the backward only."""
    ops = _backend(backend)
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    score_R = score_TE.flatten().index_select(0, _flat_pairs(plan))
    h_R2N, a_RN = ops.up(x_TD, w_gate_up, plan)
    y_RD = ops.rows_matmul(a_RN, w_down.transpose(1, 2), plan)
    return ops.combine(y_RD, score_R, plan), h_R2N, score_R


@moe_experts_fwd.register_fake
def _(
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    score_TE: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    R = token_R.shape[0]
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(R, w_gate_up.shape[1]), score_TE.new_empty(R)


@torch.library.custom_op("gristmill::moe_experts_bwd", mutates_args=())
def moe_experts_bwd(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    h_R2N: Tensor,
    score_R: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    needed: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients in the order of ``ExpertGrads``; those not ``needed`` are empty and not computed."""
    ops = _backend(backend)
    needs_x, needs_gate_up, needs_down, needs_score = needed
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    dx_TD, dw_gate_up, dw_down, dscore_TE = (tensor.new_empty(0) for tensor in (x_TD, w_gate_up, w_down, score_R))
    dout_TD = dout_TD.contiguous()  # the gradient of a sum is one number expanded: its strides suit no kernel
    dh_R2N, scaled_a_RN, dscore_R = ops.down_backward(dout_TD, h_R2N, w_down, score_R, plan)
    if needs_score:
        dscore_TE = _scatter_dscore(dscore_R, plan)
    if needs_down:
        dw_down = ops.weight_grad(dout_TD, scaled_a_RN, plan, gathered=GatheredSide.left)
    del scaled_a_RN, dout_TD
    # The rows of dx are the largest workspace of the backward: they go before the largest gradient comes.
    if needs_x:
        dx_TD = ops.combine(ops.rows_matmul(dh_R2N, w_gate_up, plan), None, plan)
    if needs_gate_up:
        dw_gate_up = ops.weight_grad(dh_R2N, x_TD, plan, gathered=GatheredSide.right)
    return dx_TD, dw_gate_up, dw_down, dscore_TE


@moe_experts_bwd.register_fake
def _(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    h_R2N: Tensor,
    score_R: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    needed: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_x, needs_gate_up, needs_down, needs_score = needed
    T, E = x_TD.shape[0], w_down.shape[0]
    return (
        x_TD.new_empty(x_TD.shape if needs_x else (0,)),
        w_gate_up.new_empty(w_gate_up.shape if needs_gate_up else (0,)),
        w_down.new_empty(w_down.shape if needs_down else (0,)),
        score_R.new_empty((T, E) if needs_score else (0,)),
    )


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TD, w_gate_up, w_down, _, *plan, backend = inputs
    _, h_R2N, score_R = output
    ctx.save_for_backward(x_TD, w_gate_up, w_down, h_R2N, score_R, *plan)
    ctx.backend = backend
    # h and the scores leave the operator only to be saved; without this, zeros the size of h would stand for their
    # gradients.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TD: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = ExpertGrads(*ctx.needs_input_grad[: len(ExpertGrads._fields)])
    num_inputs = len(ctx.needs_input_grad)
    if dout_TD is None or not any(needed):
        return (None,) * num_inputs
    grads = ExpertGrads(*moe_experts_bwd(dout_TD, *ctx.saved_tensors, list(needed), ctx.backend))
    kept = (grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True))
    return (*kept, *(None for _ in range(num_inputs - len(needed))))


moe_experts_fwd.register_autograd(_backward, setup_context=_save_for_backward)


def _backend(name: str) -> Backend:
    return BACKENDS[BackendName(name)]


def _plan(tensors: _PlanTensors) -> RoutingPlan:
    token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R = tensors
    return RoutingPlan(
        token_R=token_R,
        expert_R=expert_R,
        expert_offsets_E1=expert_offsets_E1,
        token_offsets_T1=token_offsets_T1,
        row_by_token_R=row_by_token_R,
        T=token_offsets_T1.shape[0] - 1,
        E=expert_offsets_E1.shape[0] - 1,
        R=token_R.shape[0],
    )


def _flat_pairs(plan: RoutingPlan) -> Tensor:
    """Return the flat (T, E) position of each row's pair; T·E may exceed 32 bits."""
    return plan.token_R.long() * plan.E + plan.expert_R


def _scatter_dscore(dscore_R: Tensor, plan: RoutingPlan) -> Tensor:
    """Return (T, E) gradients of the scores: the used rows' in their pairs' places, zero everywhere else."""
    is_used_R = torch.arange(plan.R, device=dscore_R.device) < plan.expert_offsets_E1[-1]
    dscore_TE = dscore_R.new_zeros(plan.T * plan.E)
    # Unused rows name the pair (0, 0), which may also be a real one: they add zero to it instead of overwriting it.
    dscore_TE.index_add_(0, _flat_pairs(plan), torch.where(is_used_R, dscore_R, 0.0))
    return dscore_TE.view(plan.T, plan.E)
