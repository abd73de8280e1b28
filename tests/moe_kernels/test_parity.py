"""Every backend against the loop over experts: each op alone, then the whole layer with all its gradients."""

import pytest
import torch

from moe_kernels import BackendName, MoEProblem, RoutingKind, moe_experts, moe_experts_ref, resolve_backend
from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.routing.build import plan_from_mask
from moe_kernels.side import GatheredSide
from moe_kernels.testing import (
    assert_as_good_as,
    assert_norm_close,
    edge_cases,
    poisoned_memory,
    random_layer,
)

CASES = edge_cases()
BACKENDS = [BackendName.reference, BackendName.portable]
D, N = 32, 24
FP32 = 1e-5  # norm-wise: fp32 rounds at 6e-8, and sums of at most a few hundred terms are reordered


def backend_of(name: BackendName, case, dtype):
    problem = MoEProblem(
        T=case.plan.T,
        D=D,
        N=N,
        E=case.plan.E,
        K=1,
        tile_m=1,
        routing=RoutingKind.top_k,
        dtype=dtype,
        arch="cpu",
    )
    return resolve_backend(name, problem)


def run(function, tensors, plan, dout_TD, **options):
    """Return the output and the gradients of all four arguments."""
    out_TD = function(*tensors, plan, **options)
    return [out_TD.detach(), *torch.autograd.grad(out_TD, tensors, dout_TD)]


def run_ref(tensors, plan, dout_TD, dtype):
    """Return what the loop gives in ``dtype`` from the same (rounded) values."""
    score_dtype = torch.promote_types(dtype, torch.float32)
    wide = [t.detach().to(score_dtype if t is tensors.score_TE else dtype).requires_grad_() for t in tensors]
    return run(moe_experts_ref, wide, plan, dout_TD.to(dtype))


def dout_of(case, dtype, seed=5):
    return torch.randn(case.plan.T, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", BACKENDS)
def test_layer_is_the_loop_in_fp32(case, name):
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.float32, seed=1)
    dout_TD = dout_of(case, torch.float32)
    actual = run(moe_experts, tensors, case.plan, dout_TD, backend=backend_of(name, case, torch.float32))
    truth = run_ref(tensors, case.plan, dout_TD, torch.float64)
    for value, expected in zip(actual, truth, strict=True):
        assert_norm_close(value, expected, FP32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_layer_is_the_loop_in_fp64(case):
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.float64, seed=1)
    dout_TD = dout_of(case, torch.float64)
    backend = backend_of(BackendName.reference, case, torch.float64)
    for value, expected in zip(
        run(moe_experts, tensors, case.plan, dout_TD, backend=backend),
        run(moe_experts_ref, tensors, case.plan, dout_TD),
        strict=True,
    ):
        assert_norm_close(value, expected, 1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_is_as_good_as_torch_in_half_precision(case, name, dtype):
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=dtype, seed=1)
    dout_TD = dout_of(case, dtype)
    actual = run(moe_experts, tensors, case.plan, dout_TD, backend=backend_of(name, case, dtype))
    baseline = run_ref(tensors, case.plan, dout_TD, dtype)
    truth = run_ref(tensors, case.plan, dout_TD, torch.float64)
    for value, same_dtype, expected in zip(actual, baseline, truth, strict=True):
        assert value.dtype == same_dtype.dtype
        assert_as_good_as(value, same_dtype, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_unwritten_reaches_an_output(case, name, dtype):
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=dtype, seed=1)
    backend, dout_TD = backend_of(name, case, dtype), dout_of(case, dtype)
    clean = run(moe_experts, tensors, case.plan, dout_TD, backend=backend)
    with poisoned_memory():
        assert torch.empty(3).isnan().all()  # the poison works
        poisoned = run(moe_experts, tensors, case.plan, dout_TD, backend=backend)
    for value, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_unused_rows_gather_reaches_no_output(name):
    # Unused rows hold token 0, expert 0: a token that no expert keeps may be anything.
    case = next(case for case in CASES if "unused rows" in case.name)
    keep_TE = case.routing.keep_TE.clone()
    keep_TE[0] = False
    plan = plan_from_mask(keep_TE, R=case.plan.R)
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.float32, seed=1)
    dout_TD = dout_of(case, torch.float32)
    with torch.no_grad():
        for tensor in (tensors.x_TD, tensors.score_TE, dout_TD):
            tensor[0] = float("nan")
    backend = backend_of(name, case, torch.float32)
    out_TD, dx_TD, _, _, dscore_TE = grads = run(moe_experts, tensors, plan, dout_TD, backend=backend)
    assert all(value.isfinite().all() for value in grads)
    for untouched in (out_TD[0], dx_TD[0], dscore_TE[~keep_TE]):
        assert (untouched == 0).all()
    assert (dscore_TE[keep_TE] != 0).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_a_tokens_experts_are_rounded_once(name, dtype):
    case = next(case for case in CASES if case.name == "K = E")
    ops, plan = backend_of(name, case, dtype), case.plan
    rows_RD = torch.randn(plan.R, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    score_R = case.prob_TE[plan.token_R, plan.expert_R]
    for scores in (score_R, None):
        assert torch.equal(ops.combine(rows_RD, scores, plan), ops.combine(rows_RD.float(), scores, plan).to(dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_repeated_runs_give_the_same_bits(name):
    case = CASES[5]
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.bfloat16, seed=1)
    backend, dout_TD = backend_of(name, case, torch.bfloat16), dout_of(case, torch.bfloat16)
    first = run(moe_experts, tensors, case.plan, dout_TD, backend=backend)
    for value, expected in zip(run(moe_experts, tensors, case.plan, dout_TD, backend=backend), first, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_strange_strides_change_nothing(name):
    case = CASES[5]
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.float32, seed=1)
    backend = backend_of(name, case, torch.float32)
    out_TD = moe_experts(*tensors, case.plan, backend=backend)
    expanded = torch.autograd.grad(out_TD.sum(), tensors, retain_graph=True)
    for value, expected in zip(expanded, torch.autograd.grad(out_TD, tensors, torch.ones_like(out_TD)), strict=True):
        assert torch.equal(value, expected)
    dout_TD = dout_of(case, torch.float32)
    expected = run(moe_experts, tensors, case.plan, dout_TD, backend=backend)
    columns_first = tensors._replace(
        x_TD=tensors.x_TD.detach().t().contiguous().t().requires_grad_(),
        score_TE=tensors.score_TE.detach().t().contiguous().t().requires_grad_(),
    )
    actual = run(moe_experts, columns_first, case.plan, dout_TD.t().contiguous().t(), backend=backend)
    for value, same in zip(actual, expected, strict=True):
        assert torch.equal(value, same)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name is not BackendName.reference])
def test_each_op_is_its_reference_twin(case, name):
    ops, twin, plan = backend_of(name, case, torch.float32), ReferenceBackend(), case.plan
    used = int(plan.expert_offsets_E1[-1])
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.float32, seed=1)
    x_TD, w_gate_up, w_down, score_TE = (tensor.detach() for tensor in tensors)
    score_R, dout_TD = twin.gather_scores(score_TE, plan), dout_of(case, torch.float32)
    assert torch.equal(score_R[:used], score_TE[plan.token_R, plan.expert_R][:used])
    h_R2N, a_RN = twin.up(x_TD, w_gate_up, plan)
    h_R2N[used:], a_RN[used:] = float("nan"), float("nan")
    y_RD = twin.rows_matmul(a_RN, w_down.transpose(1, 2), plan)
    y_RD[used:] = float("nan")

    def assert_same_rows(actual, expected):
        for rows, expected_rows in zip(actual, expected, strict=True):
            assert_norm_close(rows[:used], expected_rows[:used], FP32)

    assert_same_rows(ops.up(x_TD, w_gate_up, plan), twin.up(x_TD, w_gate_up, plan))
    assert_same_rows([ops.up_inference(x_TD, w_gate_up, plan)], [twin.up(x_TD, w_gate_up, plan)[1]])
    assert_same_rows([ops.gather_scores(score_TE, plan)], [score_R])
    assert_same_rows([ops.rows_matmul(a_RN, w_down.transpose(1, 2), plan)], [y_RD])
    assert_same_rows([ops.rows_matmul(h_R2N, w_gate_up, plan)], [twin.rows_matmul(h_R2N, w_gate_up, plan)])
    for scores in (score_R, None):
        assert_norm_close(ops.combine(y_RD, scores, plan), twin.combine(y_RD, scores, plan), FP32)
    arguments = (dout_TD, h_R2N, w_down, score_R, plan)
    actual, expected = ops.down_backward(*arguments), twin.down_backward(*arguments)
    assert_same_rows(actual[:2], expected[:2])
    assert_norm_close(actual.dscore_TE, expected.dscore_TE, FP32)
    assert torch.equal(actual.dscore_TE != 0, case.routing.keep_TE)
    for left, right, gathered in ((dout_TD, a_RN, GatheredSide.left), (h_R2N, x_TD, GatheredSide.right)):
        actual, expected = (side.weight_grad(left, right, plan, gathered=gathered) for side in (ops, twin))
        assert_norm_close(actual, expected, FP32)


def test_edge_cases_cover_what_they_name():
    by_name = {case.name: case.plan.expert_offsets_E1.diff().tolist() for case in CASES}
    assert by_name["counts 0, 1, 127, 128, 129"] == [0, 1, 127, 128, 129]
    assert by_name["counts around a tile, rounded up"] == [0, 128, 128, 128, 256]
    assert by_name["all tokens to one expert, clamped"] == [0, 64, 0]
    assert sum(by_name["T below a tile: nothing kept"]) == 0
    assert next(case.plan.R for case in CASES if case.name == "no rows allocated") == 0
    assert any(case.plan.R > int(case.plan.expert_offsets_E1[-1]) > 0 for case in CASES)


@pytest.mark.parametrize("zeroed", range(5))
def test_the_error_rules_refuse_zeros(zeroed):
    case = CASES[0]
    tensors = random_layer(case.prob_TE, D=D, N=N, dtype=torch.bfloat16, seed=1)
    dout_TD = dout_of(case, torch.bfloat16)
    baseline = run_ref(tensors, case.plan, dout_TD, torch.bfloat16)[zeroed]
    truth = run_ref(tensors, case.plan, dout_TD, torch.float64)[zeroed]
    zeros = torch.zeros_like(baseline)
    with pytest.raises(AssertionError, match="max error"):
        assert_as_good_as(zeros, baseline, truth)
    with pytest.raises(AssertionError, match="error"):
        assert_norm_close(zeros, truth, FP32)
    with pytest.raises(AssertionError, match="finite"):
        assert_norm_close(zeros + float("nan"), truth, FP32)
