"""The expert layer as opaque operators, one forward and the backward in three parts, written once over a backend's ops.

Opaque and with fakes, so that torch.compile traces through in every dtype; arguments are flat because operators take
tensors and not plans. What is saved for backward is decided here and is the same for every backend: x, h, the rows'
scores and the plan, besides the parameters; without ``keeps_h`` the backward computes h again from x. Argument checks
are in api.py.

Workspaces (a, y, dh, score·a, the rows of dx) come from torch and go at their last use: its caching allocator hands the
same memory to the next layer, so that they exist once and not once a layer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from moe_kernels.dispatch import BACKENDS, Backend, BackendName, check_runs
from moe_kernels.operators import operator
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.side import GatheredSide

_PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class ExpertGrads(NamedTuple):
    """One field per differentiable argument, in the operator's order; None where no gradient is needed."""

    x_TD: Tensor | None
    w_gate_up: Tensor | None
    w_down: Tensor | None
    score_TE: Tensor | None


@operator("moe_experts_fwd")
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
    keeps_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out_TD, h_R2N (empty and never written unless ``keeps_h``) and score_R; the last two are for the backward.

    Without ``keeps_h`` the gradients are the same, and cost another up-projection.
    """
    ops = _backend(backend)
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    D, N = w_down.shape[1:]
    check_runs(ops, D=D, N=N, E=plan.E, dtype=x_TD.dtype, device=x_TD.device)
    score_R = ops.gather_scores(score_TE, plan)
    if keeps_h:
        h_R2N, a_RN = ops.up(x_TD, w_gate_up, plan)
    else:
        h_R2N, a_RN = x_TD.new_empty(0), ops.up_inference(x_TD, w_gate_up, plan)
    y_RD = ops.rows_matmul(a_RN, w_down.transpose(1, 2), plan)
    del a_RN
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
    keeps_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    R = token_R.shape[0]
    h_R2N = x_TD.new_empty((R, w_gate_up.shape[1]) if keeps_h else (0,))
    return x_TD.new_empty(x_TD.shape), h_R2N, score_TE.new_empty(R)


@operator("moe_experts_bwd")
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
    keeps_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dh_R2N, score · a_RN and dscore_TE from a contiguous dout_TD. Without ``keeps_h``, h is computed again.

    What follows are operators of their own because a caller's tensors live as long as the operator that reads them: h
    must be gone before dw_down comes, and score · a before the rows of dx.
    """
    ops = _backend(backend)
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    if not keeps_h:
        h_R2N = ops.up(x_TD, w_gate_up, plan)[0]  # a goes at once: down_backward makes its own
    grads = ops.down_backward(dout_TD, h_R2N, w_down, score_R, plan)
    return grads.dh_R2N, grads.scaled_a_RN, grads.dscore_TE


@moe_experts_bwd.register_fake
def _(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    h_R2N: Tensor,
    score_R: Tensor,
    token_R: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    R, N = token_R.shape[0], w_down.shape[2]
    return x_TD.new_empty(R, 2 * N), x_TD.new_empty(R, N), score_R.new_empty(x_TD.shape[0], w_down.shape[0])


@operator("moe_experts_bwd_down")
def moe_experts_bwd_down(
    dout_TD: Tensor,
    scaled_a_RN: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    backend: str,
) -> Tensor:
    """Return dw_down from a contiguous dout_TD and score · a."""
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    return _backend(backend).weight_grad(dout_TD, scaled_a_RN, plan, gathered=GatheredSide.left)


@moe_experts_bwd_down.register_fake
def _(
    dout_TD: Tensor, scaled_a_RN: Tensor, token_R: Tensor, expert_R: Tensor, expert_offsets_E1: Tensor, *_: Any
) -> Tensor:
    return dout_TD.new_empty(expert_offsets_E1.shape[0] - 1, dout_TD.shape[1], scaled_a_RN.shape[1])


@operator("moe_experts_bwd_up")
def moe_experts_bwd_up(
    dh_R2N: Tensor,
    x_TD: Tensor,
    w_gate_up: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    needed: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return dx_TD and dw_gate_up, the backward from h on; those not ``needed`` are empty and not computed."""
    ops = _backend(backend)
    needs_x, needs_gate_up = needed
    plan = _plan((token_R, expert_R, expert_offsets_E1, token_offsets_T1, row_by_token_R))
    dx_TD, dw_gate_up = x_TD.new_empty(0), w_gate_up.new_empty(0)
    # The rows of dx are the largest workspace of the backward: they go before the largest gradient comes.
    if needs_x:
        dx_TD = ops.combine(ops.rows_matmul(dh_R2N, w_gate_up, plan), None, plan)
    if needs_gate_up:
        dw_gate_up = ops.weight_grad(dh_R2N, x_TD, plan, gathered=GatheredSide.right)
    return dx_TD, dw_gate_up


@moe_experts_bwd_up.register_fake
def _(
    dh_R2N: Tensor,
    x_TD: Tensor,
    w_gate_up: Tensor,
    token_R: Tensor,
    expert_R: Tensor,
    expert_offsets_E1: Tensor,
    token_offsets_T1: Tensor,
    row_by_token_R: Tensor,
    needed: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    needs_x, needs_gate_up = needed
    return (
        x_TD.new_empty(x_TD.shape if needs_x else (0,)),
        w_gate_up.new_empty(w_gate_up.shape if needs_gate_up else (0,)),
    )


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TD, w_gate_up, w_down, _, *plan, keeps_h, backend = inputs
    _, h_R2N, score_R = output
    ctx.save_for_backward(x_TD, w_gate_up, w_down, h_R2N, score_R, *plan)
    ctx.keeps_h, ctx.backend = keeps_h, backend
    # h and the scores leave the operator only to be saved; without this, zeros the size of h would stand for their
    # gradients.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TD: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = ExpertGrads(*ctx.needs_input_grad[: len(ExpertGrads._fields)])
    num_inputs = len(ctx.needs_input_grad)
    if dout_TD is None or not any(needed):
        return (None,) * num_inputs
    x_TD, w_gate_up, w_down, h_R2N, score_R, *plan = ctx.saved_tensors
    # What is saved would live until this function returns; h is to go after the first part. Does nothing where the
    # graph is kept. Not in torch's documentation; AOTAutograd's generated code relies on it for the same purpose.
    ctx.maybe_clear_saved_tensors()
    dout_TD = dout_TD.contiguous()  # the gradient of a sum is one number expanded: its strides suit no kernel
    dh_R2N, scaled_a_RN, dscore_TE = moe_experts_bwd(
        dout_TD, x_TD, w_gate_up, w_down, h_R2N, score_R, *plan, ctx.keeps_h, ctx.backend
    )
    del h_R2N
    dx_TD = dw_gate_up = dw_down = None
    if needed.w_down:
        dw_down = moe_experts_bwd_down(dout_TD, scaled_a_RN, *plan, ctx.backend)
    del scaled_a_RN
    if needed.x_TD or needed.w_gate_up:
        needed_up = [needed.x_TD, needed.w_gate_up]
        dx_TD, dw_gate_up = moe_experts_bwd_up(dh_R2N, x_TD, w_gate_up, *plan, needed_up, ctx.backend)
    grads = ExpertGrads(x_TD=dx_TD, w_gate_up=dw_gate_up, w_down=dw_down, score_TE=dscore_TE)
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
