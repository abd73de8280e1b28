"""Our operators: what a first call imports, what has no gradient, and what torch.compile makes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_kernels import BackendName, moe_experts, route_top_k
from moe_kernels.dispatch import BACKENDS
from moe_kernels.testing import random_probs

ROOT = Path(__file__).parents[2]
FIRST_STEP = """
import sys, torch
from moe_kernels import BackendName, moe_experts, route_top_k
from moe_kernels.dispatch import BACKENDS

prob_TE = torch.randn(32, 4).softmax(-1).requires_grad_()
leaves = [torch.randn(size, requires_grad=True) for size in ((32, 16), (4, 16, 16), (4, 16, 8))]
plan = route_top_k(prob_TE, 2).plan
moe_experts(*leaves, prob_TE, plan, backend=BACKENDS[BackendName.reference]).sum().backward()
assert all(leaf.grad is not None for leaf in (*leaves, prob_TE))
heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton", "cutlass"}
sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)
"""


def test_a_first_step_imports_no_compiler_and_nothing_distributed():
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RELOADED = """
import importlib, torch
import moe_kernels.layer_op, moe_kernels.operators
from moe_kernels import BackendName, moe_experts, route_top_k
from moe_kernels.dispatch import BACKENDS

prob_TE = torch.randn(32, 4).softmax(-1)
plan = route_top_k(prob_TE, 2).plan
for module in (moe_kernels.operators, moe_kernels.layer_op, moe_kernels.operators, moe_kernels.layer_op):
    importlib.reload(module)
    x_TD = torch.randn(32, 16, requires_grad=True)
    experts = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    moe_experts(x_TD, *experts, prob_TE, plan, backend=BACKENDS[BackendName.reference]).sum().backward()
    assert x_TD.grad is not None
"""


def test_operators_outlive_a_reload_of_their_modules():
    done = subprocess.run([sys.executable, "-c", RELOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SCALED = """
import torch
from moe_kernels.operators import operator

@operator("scaled")
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

scaled.register_fake(lambda x: torch.empty_like(x))
scaled.register_autograd(lambda ctx, grad: grad * FACTOR, setup_context=lambda ctx, inputs, output: None)

x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: scaled(x).sum())(x).backward()
print(x.grad.tolist())
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_code_compiled_with_another_version_of_a_backward_is_not_run(tmp_path):
    def run(factor):
        script = tmp_path / "scaled.py"
        script.write_text(SCALED.replace("FACTOR", str(factor)))
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        gradient, hits = done.stdout.splitlines()
        return gradient, int(hits)

    assert run(2) == ("[2.0, 2.0, 2.0]", 0)
    assert run(2) == ("[2.0, 2.0, 2.0]", 1)  # there is such a cache
    assert run(3) == ("[3.0, 3.0, 3.0]", 0)


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    prob_TE = random_probs(24, 4, seed=0)
    return torch.randn(24, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8), prob_TE, route_top_k(prob_TE, 2).plan


def test_a_second_derivative_is_refused_and_not_wrong(inputs):
    *tensors, plan = inputs
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out_TD = moe_experts(*leaves, plan, backend=BACKENDS[BackendName.reference])
    (dx_TD,) = torch.autograd.grad(out_TD.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"gristmill::moe_experts_bwd\S* has no gradient"):
        dx_TD.sum().backward()


def test_code_that_compiles_only_in_part_gives_the_same_numbers(inputs):
    *tensors, plan = inputs
    backend = BACKENDS[BackendName.reference]

    def run(x_TD):
        x_TD = x_TD * 2
        torch._dynamo.graph_break()
        return moe_experts(x_TD, *tensors[1:], plan, backend=backend) + 1

    def run_uncompiled_inside(x_TD):  # a generator's frame is not compiled, but what it calls may be
        return next(run(x_TD) for _ in range(1))

    expected = moe_experts(tensors[0] * 2, *tensors[1:], plan, backend=backend) + 1
    torch.compiler.reset()
    for function in (run, run_uncompiled_inside):
        assert torch.equal(torch.compile(function, backend="aot_eager")(tensors[0]), expected)


def test_nothing_that_an_operator_runs_is_compiled(inputs):
    *tensors, plan = inputs
    compiled = []

    def backend(graph, _):
        compiled.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def steps(x_TD, plan):  # torch.compile gives up where it finds this generator half used, and runs it as it is
        rows = (plan.token_R, plan.expert_R, plan.expert_offsets_E1, plan.token_offsets_T1, plan.row_by_token_R)
        yield torch.ops.gristmill.moe_experts_fwd(x_TD, *tensors[1:], *rows, True, "reference")

    def run(x_TD, plan):
        results = steps(x_TD, plan)
        torch._dynamo.graph_break()
        (result,) = results
        return result

    torch.compiler.reset()
    torch.compile(run, backend=backend)(tensors[0], plan)
    assert compiled == []
