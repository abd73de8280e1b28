"""The layer op over the Hopper kernels: what it holds, what it launches, recomputation, compilation, graphs."""

from functools import partial

import pytest
import torch

from benchmarks.memory import counted_bytes, make_contenders, measure
from benchmarks.moe_layer import make_layer
from benchmarks.shapes import MoEShape
from benchmarks.timing import launches_of
from moe_kernels import arch_of, moe_experts, moe_experts_ref
from moe_kernels.cute.tiles import KernelForm, choose_tile
from moe_kernels.dispatch import BACKENDS, BackendName
from moe_kernels.testing import assert_as_good_as, poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
if not torch.cuda.is_available() or arch_of(torch.device("cuda")) != "sm90":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

SHAPE = MoEShape(T=4096, D=256, N=192, E=16, K=4)
SLACK = 2**16  # bytes of counters and queues that kernels may ask for


@pytest.fixture(scope="module")
def inputs():
    return make_layer(SHAPE, "uniform", seed=0)


def leaves_of(inputs):
    return tuple(tensor.detach().requires_grad_() for tensor in inputs[:4])


def layer_of(inputs, **options):
    return partial(moe_experts, plan=inputs.plan, backend=BACKENDS[BackendName.cute_sm90], **options)


def step(layer, leaves, dout_TD):
    out_TD = layer(*leaves)
    return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, dout_TD)]


def assert_same_bits(actual, expected):
    for value, same in zip(actual, expected, strict=True):
        assert torch.equal(value, same)
        assert bool((value != 0).any())


def test_held_for_backward_are_x_h_scores_and_plan_and_the_peak_is_what_is_counted(inputs):
    T, D, N, E, _ = SHAPE
    R = inputs.plan.R
    columns = choose_tile(KernelForm.down_backward, D, N, R // E).columns
    parts = 4 * R * -(-N // columns)
    plain, recomputing = make_contenders("cute_sm90", inputs, {})
    for contender, recompute_h in ((plain, False), (recomputing, True)):
        measured = measure(contender, inputs.dout_TD)
        h = 0 if recompute_h else 4 * R * N
        assert measured.saved == 2 * T * D + h + 4 * R + 4 * (3 * R + (E + 1) + (T + 1))
        assert measured.held == h + 4 * R
        counted = counted_bytes(SHAPE, R, recompute_h=recompute_h)
        assert measured.saved_with_weights == counted.saved_with_weights
        assert counted.peak <= measured.peak <= counted.peak + parts + SLACK


def test_recomputing_h_gives_gradients_of_the_same_bits(inputs):
    leaves = leaves_of(inputs)
    expected = step(layer_of(inputs), leaves, inputs.dout_TD)
    with poisoned_memory():
        actual = step(layer_of(inputs, recompute_h=True), leaves, inputs.dout_TD)
    assert_same_bits(actual[1:], expected[1:])
    # The output comes from up_inference, whose tile may be another one.
    assert (actual[0] - expected[0]).float().norm() <= torch.finfo(torch.bfloat16).eps * expected[0].float().norm()


def test_evaluation_is_as_good_as_torch(inputs):
    leaves = [tensor.detach() for tensor in leaves_of(inputs)]
    with poisoned_memory():
        out_TD = layer_of(inputs)(*leaves)
    truth = moe_experts_ref(*(leaf.double() for leaf in leaves), inputs.plan)
    assert_as_good_as(out_TD, moe_experts_ref(*leaves, inputs.plan), truth)


@pytest.mark.parametrize("recompute_h", [False, True])
def test_the_layer_compiles_into_one_graph(inputs, recompute_h):
    torch._dynamo.reset()
    leaves, layer = leaves_of(inputs), layer_of(inputs, recompute_h=recompute_h)
    compiled = torch.compile(layer, fullgraph=True)
    assert_same_bits(step(compiled, leaves, inputs.dout_TD), step(layer, leaves, inputs.dout_TD))
    with torch.no_grad():
        assert_same_bits([compiled(*leaves)], [layer(*leaves)])


def kernels_of(run):
    """Return the names of everything that ``run`` puts on the GPU, memsets and copies included."""
    run()
    return [name for name, _ in launches_of(run)]


def test_the_forward_is_four_launches_and_the_backward_six(inputs):
    leaves, layer = leaves_of(inputs), layer_of(inputs)
    forward = kernels_of(lambda: layer(*leaves))
    assert len(forward) == 4, forward  # scores, up, down, combine
    out_TD = layer(*leaves)
    backward = kernels_of(lambda: torch.autograd.grad(out_TD, leaves, inputs.dout_TD, retain_graph=True))
    assert len(backward) == 6, backward  # down_backward, dscore, dw_down, dx, its sum, dw_gate_up


def test_forward_and_backward_run_in_a_graph(inputs):
    leaves, layer = leaves_of(inputs), layer_of(inputs)
    expected = step(layer, leaves, inputs.dout_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, leaves, inputs.dout_TD)
    for value in captured:
        value.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)
