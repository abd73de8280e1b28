"""moe_experts: the routed expert MLP, with its arguments checked in words. The computation is in layer_op.py."""

import sys

import torch
from torch import Tensor

from moe_kernels.dispatch import BACKENDS, Backend
from moe_kernels.layer_op import moe_experts_fwd
from moe_kernels.routing.plan import RoutingPlan


def moe_experts(
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    score_TE: Tensor,
    plan: RoutingPlan,
    *,
    backend: Backend,
    recompute_h: bool = False,
) -> Tensor:
    """Return out_TD with out[t] = Σ over the experts e kept for t of score[t, e] · w_down[e] (silu(gate) · up).

    ``w_gate_up`` is (E, 2N, D) with rows [gate; up], ``w_down`` (E, D, N), both contiguous and in the dtype of
    ``x_TD``; ``score_TE`` is fp32 (fp64 beside fp64 tokens). Differentiable once, in all four. Only the scores of pairs
    in ``plan`` are read, and only they get a gradient other than zero. A token without a pair gets zeros.

    Saved for backward are x_TD, h = the gate and up projections of every row (R, 2N), the rows' scores and the plan.
    With ``recompute_h`` h is not saved: the backward projects x_TD again, for 22 % more operations and gradients of the
    same bits. Where no gradient can be asked for, h is never written either.

    ``backend`` is one of ``dispatch.BACKENDS``, as ``dispatch.resolve_backend`` returns them.

    Raises: ValueError and TypeError for shapes, dtypes, layouts or devices that do not fit each other;
    KernelUnavailable if the backend cannot run them.
    """
    if not torch.compiler.is_compiling():
        _check_registered(backend)
    _check_arguments(x_TD, w_gate_up, w_down, score_TE, plan)
    # A constant where this is traced. Wrong, it would cost time and not the result: the backward can do without h.
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, w_gate_up, w_down, score_TE))
    out_TD, _, _ = moe_experts_fwd(
        x_TD.contiguous(),
        w_gate_up,
        w_down,
        score_TE.contiguous(),
        plan.token_R,
        plan.expert_R,
        plan.expert_offsets_E1,
        plan.token_offsets_T1,
        plan.row_by_token_R,
        needs_grad and not recompute_h,
        backend.name,
    )
    return out_TD


def _check_registered(backend: Backend) -> None:
    if not any(backend is known for known in BACKENDS.values()):
        raise ValueError(
            f"backend is {backend!r}, and no value of moe_kernels.dispatch.BACKENDS "
            f"({', '.join(name.value for name in BACKENDS)}): the layer finds its ops there, by name. Pass what "
            "resolve_backend returns; a backend of your own is added there first"
        )


def _check_arguments(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, score_TE: Tensor, plan: RoutingPlan) -> None:
    tensors = {"x_TD": x_TD, "w_gate_up": w_gate_up, "w_down": w_down, "score_TE": score_TE}
    for name, tensor in tensors.items():
        if _is_dtensor(tensor):
            raise TypeError(
                f"{name} is a DTensor; moe_experts computes on one device. Inside a module sharded by fully_shard the "
                "parameters of forward are plain tensors: call the module, not its sharded parameters"
            )
        if tensor.device != x_TD.device:
            raise ValueError(f"{name} is on {tensor.device}, x_TD on {x_TD.device}: they must be on one device")
    if plan.token_R.device != x_TD.device:
        raise ValueError(f"the plan is on {plan.token_R.device}, x_TD on {x_TD.device}: route on the device of x_TD")
    T, E = plan.T, plan.E
    if x_TD.dim() != 2 or x_TD.shape[0] != T:
        raise ValueError(f"x_TD has shape {tuple(x_TD.shape)}, expected (T, D) with the plan's T={T}")
    D = x_TD.shape[1]
    if w_down.dim() != 3 or w_down.shape[:2] != (E, D):
        raise ValueError(f"w_down has shape {tuple(w_down.shape)}, expected (E, D, N) = ({E}, {D}, N)")
    N = w_down.shape[2]
    if w_gate_up.shape != (E, 2 * N, D):
        raise ValueError(f"w_gate_up has shape {tuple(w_gate_up.shape)}, expected (E, 2N, D) = {(E, 2 * N, D)}")
    if score_TE.shape != (T, E):
        raise ValueError(f"score_TE has shape {tuple(score_TE.shape)}, expected (T, E) = {(T, E)}")
    for name, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if weight.dtype != x_TD.dtype:
            raise TypeError(f"{name} is {weight.dtype}, x_TD {x_TD.dtype}: cast one to the other's dtype")
        if not weight.is_contiguous():
            raise ValueError(f"{name} has strides {weight.stride()}; expert weights must be contiguous")
    score_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    if score_TE.dtype != score_dtype:
        raise TypeError(f"score_TE is {score_TE.dtype}, expected {score_dtype} beside x_TD in {x_TD.dtype}")


def _is_dtensor(tensor: Tensor) -> bool:
    # Whoever has one has imported this; importing it here would cost a process without sharding half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
