"""What the layer op keeps for its backward and how long, and that without h it gives the same bits."""

from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_kernels import BackendName, Rounding, moe_experts, route_token_rounding, route_top_k
from moe_kernels.dispatch import BACKENDS
from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.side import GatheredSide
from moe_kernels.testing import edge_cases, random_layer, random_probs, saved_for_backward


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_saves_x_h_scores_and_plan_besides_the_parameters(dtype, recompute_h):
    T, D, N, E = 40, 16, 8, 4
    prob_TE = random_probs(T, E, seed=0)
    plan = route_token_rounding(prob_TE, 2, tile_m=8, rounding=Rounding.nearest).plan
    backend = BACKENDS[BackendName.portable]
    tensors = random_layer(prob_TE, D=D, N=N, dtype=dtype, seed=0)
    with saved_for_backward() as saved:
        out_TD = moe_experts(*tensors, plan, backend=backend, recompute_h=recompute_h)
    assert out_TD.grad_fn is not None
    for weight in (tensors.w_gate_up, tensors.w_down):
        assert saved.pop(weight.untyped_storage().data_ptr()) == weight.nbytes
    R, size = plan.R, dtype.itemsize
    activations = T * D * size + (0 if recompute_h else R * 2 * N * size) + R * 4  # x, h, scores
    assert sum(saved.values()) == activations + 4 * (3 * R + (E + 1) + (T + 1))


def test_backward_allocates_nothing_the_size_of_h_outside_the_operator():
    prob_TE = random_probs(20, 4, seed=0)
    plan = route_top_k(prob_TE, 2).plan
    tensors = random_layer(prob_TE, D=8, N=5, dtype=torch.float32, seed=0)
    out_TD = moe_experts(*tensors, plan, backend=BACKENDS[BackendName.reference])
    shapes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is not torch.ops.aten.detach.default:  # saved outputs are unpacked as views
                shapes.extend(tuple(value.shape) for value in tree_leaves(result) if isinstance(value, torch.Tensor))
            return result

    with Record():
        torch.autograd.grad(out_TD, tensors, torch.ones(20, 8))
    assert (4, 10, 8) in shapes  # dw_gate_up: the operators were seen
    assert shapes.count((plan.R, 10)) == 1  # dh, from one half of the backward to the other


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_never_writes_h(compiled, counting):
    torch._dynamo.reset()
    prob_TE = random_probs(20, 4, seed=0)
    plan = route_top_k(prob_TE, 2).plan
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)

    def layer(x_TD, w_gate_up, w_down, score_TE):
        # Inputs made here: what a tracer must know of gradients is not only what it was given.
        return moe_experts(2 * x_TD, w_gate_up, w_down, 2 * score_TE, plan, backend=counting)

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    trained_TD = run(*tensors)
    assert counting.calls == counting.forward_calls(writes_h=True)
    counting.calls.clear()
    with torch.no_grad():
        evaluated_TD = run(*tensors)
    assert counting.calls == counting.forward_calls(writes_h=False)
    counting.calls.clear()
    run(*(tensor.detach() for tensor in tensors))
    assert counting.calls == counting.forward_calls(writes_h=False)
    assert torch.equal(evaluated_TD, trained_TD)
    assert (evaluated_TD != 0).any()


def outputs_and_gradients(tensors, plan, dout_TD, **options):
    out_TD = moe_experts(*tensors, plan, **options)
    return [out_TD, *torch.autograd.grad(out_TD, tensors, dout_TD)]


@pytest.mark.parametrize("case", edge_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", [BackendName.portable, BackendName.reference])
def test_recomputing_h_gives_the_same_bits(name, case):
    tensors = random_layer(case.prob_TE, D=16, N=8, dtype=torch.bfloat16, seed=0)
    dout_TD = torch.randn(case.plan.T, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    backend = BACKENDS[name]
    expected = outputs_and_gradients(tensors, case.plan, dout_TD, backend=backend)
    actual = outputs_and_gradients(tensors, case.plan, dout_TD, backend=backend, recompute_h=True)
    for value, same in zip(actual, expected, strict=True):
        assert torch.equal(value, same)


class Watched(ReferenceBackend):
    """Asks, when the rows of dx are to be allocated, whether the h that was read before is gone."""

    def __init__(self):
        self.h = self.scaled_a = None
        self.h_was_gone, self.scaled_a_was_gone = [], []

    def down_backward(self, dout_TD, h_R2N, w_down, score_R, plan):
        grads = super().down_backward(dout_TD, h_R2N, w_down, score_R, plan)
        self.h, self.scaled_a = (StorageWeakRef(t.untyped_storage()) for t in (h_R2N, grads.scaled_a_RN))
        return grads

    def weight_grad(self, left, right, plan, *, gathered, into=None):
        if gathered is GatheredSide.left:
            self.h_was_gone.append(self.h.expired())
        return super().weight_grad(left, right, plan, gathered=gathered, into=into)

    def rows_matmul(self, rows_RX, w_EXY, plan):
        if self.scaled_a is not None:
            self.scaled_a_was_gone.append(self.scaled_a.expired())
        return super().rows_matmul(rows_RX, w_EXY, plan)


@pytest.mark.parametrize("recompute_h", [False, True])
def test_h_is_gone_before_dw_down_comes_unless_the_graph_is_kept(recompute_h, monkeypatch):
    watched = Watched()
    monkeypatch.setitem(BACKENDS, BackendName.reference, watched)
    prob_TE = random_probs(20, 4, seed=0)
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    out_TD = moe_experts(*tensors, route_top_k(prob_TE, 2).plan, backend=watched, recompute_h=recompute_h)
    first = torch.autograd.grad(out_TD.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(out_TD.sum(), tensors)
    assert watched.h_was_gone == [recompute_h, True]
    assert watched.scaled_a_was_gone == [True, True]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def save_experts(_, op, *args, **kwargs):
    is_experts = op is torch.ops.gristmill.moe_experts_fwd.default
    return CheckpointPolicy.MUST_SAVE if is_experts else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_keeps_outputs_and_gradients(compiled, selective, recompute_h, counting):
    torch._dynamo.reset()
    prob_TE = random_probs(20, 4, seed=0)
    plan = route_top_k(prob_TE, 2).plan
    tensors = random_layer(prob_TE, D=8, N=4, dtype=torch.float32, seed=0)
    dout_TD = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    expected = outputs_and_gradients(tensors, plan, dout_TD, backend=counting)
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(save_experts)} if selective else {}

    def layer(*tensors):
        experts = partial(moe_experts, backend=counting, recompute_h=recompute_h)
        return checkpoint(experts, *tensors, plan, use_reentrant=False, **options)

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    counting.calls.clear()
    out_TD = run(*tensors)
    gradients = torch.autograd.grad(out_TD, tensors, dout_TD)
    for value, same in zip((out_TD, *gradients), expected, strict=True):
        assert torch.equal(value, same)
    forwards = 1 if selective else 2
    assert counting.calls["combine"] == forwards + 1
    assert counting.calls["up"] == (1 if recompute_h else forwards)
    assert counting.calls["up_inference"] == (forwards if recompute_h else 0)
