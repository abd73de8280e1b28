"""The layer op: gradients by finite differences, what it does not compute, and that it compiles.

What it keeps for the backward, and computes again: test_kept_for_backward.py.
"""

from collections import Counter
from itertools import product

import pytest
import torch

from moe_kernels import (
    BackendName,
    MoEProblem,
    Rounding,
    RoutingKind,
    moe_experts,
    resolve_backend,
    route_expert_choice,
    route_token_rounding,
    route_top_k,
)
from moe_kernels.testing import random_layer, random_probs

ROUTINGS = {
    "top_k": lambda prob_TE: route_top_k(prob_TE, 2),
    "expert_choice": lambda prob_TE: route_expert_choice(prob_TE, 2),
    **{
        f"token_rounding {rule.name}": lambda prob_TE, rule=rule: route_token_rounding(
            prob_TE, 2, tile_m=4, rounding=rule, seed=3
        )
        for rule in Rounding
    },
}


def backend_for(name: BackendName, *, D: int, N: int, dtype: torch.dtype):
    problem = MoEProblem(T=1, D=D, N=N, E=1, K=1, tile_m=1, routing=RoutingKind.token_rounding, dtype=dtype, arch="cpu")
    return resolve_backend(name, problem)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients_are_finite_differences_from_logits_to_output(routing, normalized):
    T, D, N, E = 13, 4, 3, 5
    backend = backend_for(BackendName.reference, D=D, N=N, dtype=torch.float64)
    tensors = random_layer(random_probs(T, E, seed=0), D=D, N=N, dtype=torch.float64, seed=0)
    logits_TE = torch.randn(T, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def layer(x_TD, w_gate_up, w_down, logits_TE):
        prob_TE = logits_TE.softmax(-1)
        route = ROUTINGS[routing](prob_TE)
        score_TE = prob_TE / (prob_TE * route.top_k_mask_TE).sum(-1, keepdim=True) if normalized else prob_TE
        return moe_experts(x_TD, w_gate_up, w_down, score_TE, route.plan, backend=backend)

    arguments = (tensors.x_TD, tensors.w_gate_up, tensors.w_down, logits_TE)
    assert (layer(*arguments) != 0).any()
    assert torch.autograd.gradcheck(layer, arguments)


def test_ops_are_given_contiguous_tensors(counting):
    prob_TE = random_probs(20, 4, seed=0)
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    x_TD, score_TE = (t.detach().t().contiguous().t().requires_grad_() for t in (tensors.x_TD, tensors.score_TE))
    plan = route_top_k(prob_TE, 2).plan
    moe_experts(x_TD, *tensors[1:3], score_TE, plan, backend=counting).sum().backward()
    assert counting.calls.total() == 4 + 5


@pytest.mark.parametrize("needed", list(product([False, True], repeat=4)))
@pytest.mark.parametrize("recompute_h", [False, True])
def test_gradients_that_are_not_needed_are_not_computed(needed, recompute_h, counting):
    prob_TE = random_probs(20, 4, seed=0)
    plan = route_top_k(prob_TE, 2).plan
    everything = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    out_TD = moe_experts(*everything, plan, backend=counting)
    expected = torch.autograd.grad(out_TD.square().sum(), everything)
    tensors = [tensor.detach().requires_grad_(is_needed) for tensor, is_needed in zip(everything, needed, strict=True)]
    counting.calls.clear()
    out_TD = moe_experts(*tensors, plan, backend=counting, recompute_h=recompute_h)
    assert out_TD.requires_grad is any(needed)
    assert counting.calls == counting.forward_calls(writes_h=any(needed) and not recompute_h)
    if not any(needed):
        return
    counting.calls.clear()
    out_TD.square().sum().backward()
    needs_x, needs_gate_up, needs_down, _ = needed
    weight_grads = needs_gate_up + needs_down
    expected_calls = {"down_backward": 1, "weight_grad": weight_grads, "rows_matmul": needs_x, "combine": needs_x}
    assert +counting.calls == +Counter(**expected_calls, up=recompute_h)
    for tensor, is_needed, gradient in zip(tensors, needed, expected, strict=True):
        assert torch.equal(tensor.grad, gradient) if is_needed else tensor.grad is None


def test_scores_outside_the_plan_get_exactly_zero_gradient():
    prob_TE = random_probs(30, 4, seed=0)
    routing = route_token_rounding(prob_TE, 2, tile_m=8, rounding=Rounding.up)
    assert int(routing.plan.expert_offsets_E1[-1]) < routing.plan.R  # unused rows name the pair (0, 0)
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    backend = backend_for(BackendName.reference, D=8, N=4, dtype=torch.float32)
    (dscore_TE,) = torch.autograd.grad(moe_experts(*tensors, routing.plan, backend=backend).sum(), tensors.score_TE)
    assert torch.equal(dscore_TE != 0, routing.keep_TE)


def test_a_second_derivative_is_refused():
    prob_TE = random_probs(8, 4, seed=0)
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    backend = backend_for(BackendName.portable, D=8, N=4, dtype=torch.float32)
    out_TD = moe_experts(*tensors, route_top_k(prob_TE, 2).plan, backend=backend)
    (dx_TD,) = torch.autograd.grad(out_TD.square().sum(), tensors.x_TD, create_graph=True)
    with pytest.raises(RuntimeError):
        dx_TD.sum().backward()


def routed_layer(rounding, backend, recompute_h):
    def layer(x_TD, w_router, w_gate_up, w_down, seed):
        prob_TE = (x_TD.float() @ w_router.float().t()).softmax(-1)
        route = route_token_rounding(prob_TE, 2, tile_m=8, rounding=rounding, seed=seed)
        out_TD = moe_experts(x_TD, w_gate_up, w_down, prob_TE, route.plan, backend=backend, recompute_h=recompute_h)
        return out_TD, route.keep_TE

    return layer


def compiled_against_eager(compiler, dtype, rounding, seeds, recompute_h=False):
    torch._dynamo.reset()
    T, D, N, E = 70, 16, 16, 8
    backend = backend_for(BackendName.portable, D=D, N=N, dtype=dtype)
    layer = routed_layer(rounding, backend, recompute_h)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    tensors = random_layer(random_probs(T, E, seed=0), D=D, N=N, dtype=dtype, seed=0)
    w_router = torch.randn(E, D, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    arguments = (tensors.x_TD, w_router, tensors.w_gate_up, tensors.w_down)
    dout_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(3)).to(dtype)
    for seed in seeds:
        out_TD, keep_TE = compiled(*arguments, seed)
        expected_TD, expected_keep_TE = layer(*arguments, seed)
        assert torch.equal(keep_TE, expected_keep_TE)
        yield from zip(
            [out_TD, *torch.autograd.grad(out_TD, arguments, dout_TD)],
            [expected_TD, *torch.autograd.grad(expected_TD, arguments, dout_TD)],
            strict=True,
        )


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, Rounding.nearest), *((torch.float32, rule) for rule in Rounding)]
)
def test_routing_and_layer_trace_into_one_graph(dtype, rounding):
    recompute_h = rounding is Rounding.up
    for actual, expected in compiled_against_eager("aot_eager", dtype, rounding, (1, 2), recompute_h):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_and_layer_compile_with_inductor(dtype):
    # Inductor fuses the router differently, so its rounding differs in the last place of the compute dtype.
    tolerance = 8 * torch.finfo(dtype).eps
    for actual, expected in compiled_against_eager("inductor", dtype, Rounding.balanced, seeds=(1,)):
        assert (actual - expected).float().norm() <= tolerance * expected.float().norm()
        assert (actual != 0).any()


def test_operators_pass_torchs_own_checks():
    prob_TE = random_probs(20, 4, seed=0)
    plan = route_token_rounding(prob_TE, 2, tile_m=4, rounding=Rounding.nearest).plan
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    plan_tensors = (
        plan.token_R,
        plan.expert_R,
        plan.expert_offsets_E1,
        plan.token_offsets_T1,
        plan.row_by_token_R,
    )
    x_TD, w_gate_up, w_down, _ = (tensor.detach() for tensor in tensors)
    h_R2N, score_R = torch.randn(plan.R, 8), torch.rand(plan.R)
    for keeps_h in (True, False):
        torch.library.opcheck(
            torch.ops.gristmill.moe_experts_fwd.default,
            (*tensors, *plan_tensors, keeps_h, "reference"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
        h = h_R2N if keeps_h else torch.empty(0)
        torch.library.opcheck(
            torch.ops.gristmill.moe_experts_bwd.default,
            (x_TD, x_TD, w_gate_up, w_down, h, score_R, *plan_tensors, keeps_h, "reference"),
            test_utils=("test_schema", "test_faketensor"),
        )
    torch.library.opcheck(
        torch.ops.gristmill.moe_experts_bwd_down.default,
        (x_TD, h_R2N[:, :4].contiguous(), *plan_tensors, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
    for needed in ([True, True], [False, True], [True, False]):
        torch.library.opcheck(
            torch.ops.gristmill.moe_experts_bwd_up.default,
            (h_R2N, x_TD, w_gate_up, *plan_tensors, needed, "reference"),
            test_utils=("test_schema", "test_faketensor"),
        )
