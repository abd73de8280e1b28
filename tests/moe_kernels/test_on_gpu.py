"""On a GPU: routing gives the plans of the CPU, and the portable backend is as good as torch on the CPU."""

from dataclasses import fields

import pytest
import torch

from moe_kernels import (
    BackendName,
    MoEProblem,
    Rounding,
    RoutingKind,
    arch_of,
    moe_experts,
    moe_experts_ref,
    resolve_backend,
    route_expert_choice,
    route_token_rounding,
    route_top_k,
)
from moe_kernels.testing import assert_as_good_as, edge_cases, plan_on, random_layer, random_probs

pytestmark = pytest.mark.gpu
D, N = 64, 32


@pytest.mark.parametrize("levels", [None, 8])  # 8 distinct values: ties everywhere
def test_plans_are_the_cpus(levels):
    prob_TE = random_probs(1000, 24, seed=0)
    if levels is not None:
        prob_TE = (prob_TE * levels * 4).round() / levels
    routes = [
        lambda prob_TE: route_top_k(prob_TE, 3),
        lambda prob_TE: route_expert_choice(prob_TE, 3),
        *(
            lambda prob_TE, rule=rule: route_token_rounding(prob_TE, 3, tile_m=64, rounding=rule, seed=5)
            for rule in Rounding
        ),
    ]
    for route in routes:
        expected, actual = route(prob_TE).plan, plan_on(route(prob_TE.cuda()).plan, "cpu")
        for field in fields(expected):
            value = getattr(expected, field.name)
            same = torch.equal(getattr(actual, field.name), value) if isinstance(value, torch.Tensor) else True
            assert same, field.name


@pytest.mark.parametrize("case", edge_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_is_as_good_as_torch(case, dtype):
    problem = MoEProblem(
        T=case.plan.T,
        D=D,
        N=N,
        E=case.plan.E,
        K=1,
        tile_m=1,
        routing=RoutingKind.top_k,
        dtype=dtype,
        arch=arch_of(torch.device("cuda")),
    )
    backend = resolve_backend(BackendName.portable, problem)
    dout_TD = torch.randn(case.plan.T, D, generator=torch.Generator().manual_seed(5)).to(dtype)

    def run(function, tensors, plan, dout_TD, **options):
        out_TD = function(*tensors, plan, **options)
        return [value.cpu() for value in (out_TD.detach(), *torch.autograd.grad(out_TD, tensors, dout_TD))]

    layer = random_layer(case.prob_TE, D=D, N=N, dtype=dtype, seed=1)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in layer]
    actual = run(moe_experts, on_gpu, plan_on(case.plan, "cuda"), dout_TD.cuda(), backend=backend)
    baseline = run(moe_experts_ref, layer, case.plan, dout_TD)
    truth = run(moe_experts_ref, [t.detach().double().requires_grad_() for t in layer], case.plan, dout_TD.double())
    for value, same_dtype, expected in zip(actual, baseline, truth, strict=True):
        assert_as_good_as(value, same_dtype, expected)
