"""The Hopper kernels on a Hopper GPU: each op and the whole layer against the reference, and what must not happen."""

from dataclasses import replace

import pytest
import torch

from moe_kernels import BackendName, MoEProblem, RoutingKind, arch_of, moe_experts, moe_experts_ref, resolve_backend
from moe_kernels.cute.compile import KernelCache
from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.cute.tiles import KernelForm, TileConfig, choose_tile, table_entries, why_invalid
from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.routing.kinds import Rounding
from moe_kernels.routing.token_rounding import route_token_rounding
from moe_kernels.routing.top_k import route_top_k
from moe_kernels.side import GatheredSide
from moe_kernels.testing import (
    assert_as_good_as,
    edge_cases,
    plan_on,
    poisoned_memory,
    probs_with_counts,
    random_layer,
    random_probs,
)
from tests.moe_kernels.cute.weight_grad_tiles import SCHEDULES, weight_grad_tile

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
if not torch.cuda.is_available() or arch_of(torch.device("cuda")) != "sm90":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BACKEND, REFERENCE = CuteSm90Backend(), ReferenceBackend()
EVEN, TAILS = (256, 192), (200, 136)  # (D, N)
# Every way in which a width can end: below, at and past a box of 64 and a tile of 128, 192 or 256; odd tile counts.
WIDTHS = [
    *((8, 8), (24, 72), (64, 64), (128, 64), (64, 128), (128, 128), (136, 64), (192, 32)),
    *((384, 1408), (1408, 384), (2304, 768), (2880, 2880), (7168, 2048)),
]
OPS = ["up", "up_inference", "down", "dx", "down_backward", "dw_down", "dw_gate_up", "combine", "sum"]


def skewed():
    """Return the plan of an empty, an overfull and many ordinary experts."""
    prob_TE = random_probs(1000, 16, seed=3)
    prob_TE[:, 3], prob_TE[:, 5] = 0.0, 1.0
    return route_top_k(prob_TE, 4).plan


def rounded():
    return route_token_rounding(random_probs(1000, 16, seed=3), 4, tile_m=128, rounding=Rounding.up).plan


CASES = {
    "skewed": (skewed, EVEN),
    "rounded up, unused rows": (rounded, EVEN),
    "1024 experts, most of them empty": (lambda: route_top_k(random_probs(70, 1024, seed=4), 3).plan, EVEN),
    "Zipf loads": (lambda: route_top_k(zipf_probs(2000, 64), 8).plan, EVEN),
    "K = 32": (lambda: route_top_k(random_probs(300, 40, seed=6), 32).plan, EVEN),
    **{f"tails, {case.name}": (lambda case=case: case.plan, TAILS) for case in edge_cases()},
}


def zipf_probs(T, E):
    weight_E = torch.arange(1, E + 1, dtype=torch.float32) ** -1.2
    generator = torch.Generator().manual_seed(7)
    gumbel_TE = -torch.log(-torch.log(torch.rand(T, E, generator=generator).clamp(1e-6, 1 - 1e-6)))
    return (weight_E.log() + gumbel_TE).softmax(-1)


def on_gpu(plan):
    return plan_on(plan, "cuda")


class Inputs:
    """Unit-scale inputs of all ops; rows of no expert hold NaN, which must reach nothing."""

    def __init__(self, plan, D, N, dtype, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape, scale=1.0):
            return torch.randn(*shape, device="cuda", generator=generator, dtype=dtype).mul_(scale)

        self.used = int(plan.expert_offsets_E1[-1])
        self.x_TD, self.dout_TD = normal(plan.T, D), normal(plan.T, D)
        self.w_gate_up = normal(plan.E, 2 * N, D, scale=D**-0.5)
        self.w_down = normal(plan.E, D, N, scale=N**-0.5)
        self.h_R2N, self.a_RN, self.y_RD = normal(plan.R, 2 * N), normal(plan.R, N), normal(plan.R, D)
        self.score_R = torch.rand(plan.R, device="cuda", generator=generator)
        for rows in (self.h_R2N, self.a_RN, self.y_RD, self.score_R):
            rows[self.used :] = float("nan")


class Wide:
    """``Inputs`` in fp64, each only when it is asked for: all weights of 1024 experts would take 20 GB."""

    def __init__(self, inputs):
        self._inputs = inputs

    def __getattr__(self, name):
        value = getattr(self._inputs, name)
        return value.double() if torch.is_tensor(value) else value


def run(backend, op, t, plan):
    """Return the op's outputs, without rows of no expert."""
    used = t.used
    match op:
        case "up":
            return [rows[:used] for rows in backend.up(t.x_TD, t.w_gate_up, plan)]
        case "up_inference":
            if backend is REFERENCE:
                return [backend.up(t.x_TD, t.w_gate_up, plan)[1][:used]]
            return [backend.up_inference(t.x_TD, t.w_gate_up, plan)[:used]]
        case "down":
            return [backend.rows_matmul(t.a_RN, t.w_down.transpose(1, 2), plan)[:used]]
        case "dx":
            return [backend.rows_matmul(t.h_R2N, t.w_gate_up, plan)[:used]]
        case "down_backward":
            return [rows[:used] for rows in backend.down_backward(t.dout_TD, t.h_R2N, t.w_down, t.score_R, plan)]
        case "dw_down":
            return [backend.weight_grad(t.dout_TD, t.a_RN, plan, gathered=GatheredSide.left)]
        case "dw_gate_up":
            return [backend.weight_grad(t.h_R2N, t.x_TD, plan, gathered=GatheredSide.right)]
        case "combine":
            return [backend.combine(t.y_RD, t.score_R, plan)]
        case "sum":
            return [backend.combine(t.y_RD, None, plan)]


def check(op, plan, D, N, dtype, *, backend=BACKEND):
    inputs = Inputs(plan, D, N, dtype)
    with poisoned_memory():
        actual = run(backend, op, inputs, plan)
    if inputs.used == 0 and op not in ("dw_down", "dw_gate_up", "combine", "sum"):
        return
    baseline = run(REFERENCE, op, inputs, plan)
    truth = run(REFERENCE, op, Wide(inputs), plan)
    for mine, theirs, exact in zip(actual, baseline, truth, strict=True):
        assert_as_good_as(mine, theirs, exact)
    with poisoned_memory():
        again = run(backend, op, inputs, plan)
    assert all(torch.equal(one, two) for one, two in zip(actual, again, strict=True)), "not the same bits twice"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_each_op_is_as_good_as_torch_and_repeats_its_bits(op, case):
    make_plan, (D, N) = CASES[case]
    check(op, on_gpu(make_plan()), D, N, torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_each_op_runs_in_fp16(op):
    check(op, on_gpu(skewed()), *EVEN, torch.float16)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("combine", "sum")])
@pytest.mark.parametrize(("D", "N"), WIDTHS)
def test_each_op_is_right_at_every_width(op, D, N):
    check(op, on_gpu(skewed()), D, N, torch.bfloat16)


@pytest.mark.parametrize("make_plan", [skewed, rounded])
def test_rows_of_no_expert_are_not_written(make_plan):
    plan = on_gpu(make_plan())
    inputs = Inputs(plan, *EVEN, torch.bfloat16)
    with poisoned_memory():
        h_R2N, a_RN = BACKEND.up(inputs.x_TD, inputs.w_gate_up, plan)
        y_RD = BACKEND.rows_matmul(inputs.a_RN, inputs.w_down.transpose(1, 2), plan)
        grads = BACKEND.down_backward(inputs.dout_TD, inputs.h_R2N, inputs.w_down, inputs.score_R, plan)
    for rows in (h_R2N, a_RN, y_RD, grads.dh_R2N, grads.scaled_a_RN):
        assert bool(rows[inputs.used :].isnan().all())


@pytest.mark.parametrize("kind", [RoutingKind.top_k, RoutingKind.token_rounding])
def test_layer_and_all_gradients_are_as_good_as_torch(kind):
    D, N = EVEN
    prob_TE = random_probs(1000, 16, seed=8)
    routing = (
        route_top_k(prob_TE, 4)
        if kind is RoutingKind.top_k
        else route_token_rounding(prob_TE, 4, tile_m=128, rounding=Rounding.nearest)
    )
    problem = MoEProblem(
        T=1000, D=D, N=N, E=16, K=4, tile_m=128, routing=kind, dtype=torch.bfloat16, arch=arch_of(torch.device("cuda"))
    )
    backend = resolve_backend(BackendName.auto, problem)
    assert backend.name == "cute_sm90"
    plan = on_gpu(routing.plan)
    tensors = random_layer(prob_TE, D=D, N=N, dtype=torch.bfloat16, seed=1, device="cuda")
    dout_TD = torch.randn(1000, D, generator=torch.Generator().manual_seed(2)).cuda().bfloat16()

    def gradients(function, arguments, dout, **options):
        out_TD = function(*arguments, plan, **options)
        return [out_TD, *torch.autograd.grad(out_TD, arguments, dout)]

    with poisoned_memory():
        actual = gradients(moe_experts, tensors, dout_TD, backend=backend)
    baseline = gradients(moe_experts_ref, tensors, dout_TD)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = gradients(moe_experts_ref, exact, dout_TD.double())
    for mine, theirs, exactly in zip(actual, baseline, truth, strict=True):
        assert_as_good_as(mine.detach(), theirs.detach(), exactly.detach())


def test_nothing_is_compiled_for_another_number_of_tokens():
    backend = CuteSm90Backend(cache=KernelCache(BACKEND.cache.folder))
    D, N = EVEN
    for T in (1000, 999, 128, 1, 4096):
        plan = on_gpu(route_top_k(random_probs(T, 16, seed=T), 4).plan)
        inputs = Inputs(plan, D, N, torch.bfloat16)
        for op in OPS:
            run(backend, op, inputs, plan)
        seen = backend.cache.num_compiled + backend.cache.num_loaded
        assert seen == 7, "one kernel for each form, at the first T"


def test_kernels_run_in_a_graph_and_on_two_streams_at_once():
    plan = on_gpu(skewed())
    inputs = Inputs(plan, *EVEN, torch.bfloat16)

    def forward():
        _, a_RN = BACKEND.up(inputs.x_TD, inputs.w_gate_up, plan)
        y_RD = BACKEND.rows_matmul(a_RN, inputs.w_down.transpose(1, 2), plan)
        return BACKEND.combine(y_RD, inputs.score_R, plan)

    expected = forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(forward())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)


def test_addresses_past_32_bits_reach_the_right_rows():
    D, N, T, K, E = 1032, 64, 262_144, 8, 16
    plan = on_gpu(route_top_k(random_probs(T, E, seed=9), K).plan)
    assert plan.R * D > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    a_RN = torch.randn(plan.R, N, device="cuda", generator=generator).bfloat16()
    w_down = torch.randn(E, D, N, device="cuda", generator=generator).bfloat16() * N**-0.5
    y_RD = BACKEND.rows_matmul(a_RN, w_down.transpose(1, 2), plan)
    last = slice(plan.R - 1000, plan.R)  # all of the last expert
    assert int(plan.expert_R[last.start]) == E - 1
    truth = a_RN[last].double() @ w_down[E - 1].double().t()
    assert_as_good_as(y_RD[last], a_RN[last] @ w_down[E - 1].t(), truth)
    out_TD = BACKEND.combine(y_RD, None, plan)
    token = plan.token_R[last][-8:].long()
    rows = plan.row_by_token_R.view(T, K)[token].long()
    assert_as_good_as(out_TD[token], y_RD[rows].sum(1), y_RD[rows].double().sum(1))


def plan_with_counts(counts, seed=0):
    """Return a plan of one expert per token, whose loads are ``counts``."""
    return route_top_k(probs_with_counts(counts, seed=seed), 1).plan


LOADS = {
    "heavy expert last": lambda: plan_with_counts([64, 0, 1, *[30] * 30, 3000]),
    "heavy expert first, odd counts": lambda: plan_with_counts([3000, *[63, 65, 0] * 11]),
    "one expert has all": lambda: plan_with_counts([0, 0, 1500, 0]),
    "loads that double": lambda: plan_with_counts([2**i for i in range(12)]),
    "1024 experts, most of them empty": lambda: route_top_k(random_probs(70, 1024, seed=4), 3).plan,
    "fewer units than clusters": lambda: plan_with_counts([200]),
}
ROW_OPS = ["up", "up_inference", "down", "dx", "down_backward"]
WEIGHT_GRAD_OPS = ["dw_down", "dw_gate_up"]
FEW, ALL, TOO_MANY = 3, None, 150  # clusters: units for many turns, as many as run at once, and some that start late


def backend_of(clusters=ALL, **changes):
    """Return a backend whose tiles have ``changes``, and which launches so many clusters."""
    backend = CuteSm90Backend(cache=BACKEND.cache, choose=lambda *widths: replace(choose_tile(*widths), **changes))
    if clusters is not None:
        backend._num_clusters[torch.device("cuda", torch.cuda.current_device())] = clusters
    return backend


def assert_counters_are_zero(backend):
    assert backend._counters
    assert not any(bool(counter) for counter in backend._counters.values()), "kernels leave their counters at zero"


BY_CLAIM = {
    (claims, clusters): backend_of(clusters, claims_units=claims)
    for claims in (True, False)
    for clusters in (FEW, ALL, TOO_MANY)
}


@pytest.mark.parametrize("op", [*ROW_OPS, *WEIGHT_GRAD_OPS])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("clusters", [FEW, ALL, TOO_MANY])
@pytest.mark.parametrize("claims", [True, False])
def test_each_unit_is_computed_whoever_gets_it(claims, clusters, load, op):
    backend = BY_CLAIM[claims, clusters]
    for _ in range(2):  # a counter that is not left at zero, the second one's units fall to nobody
        check(op, on_gpu(LOADS[load]()), *EVEN, torch.bfloat16, backend=backend)
    assert_counters_are_zero(backend)


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("clusters", [FEW, TOO_MANY])
@pytest.mark.parametrize("width", [64, 128, 192, 256, 320, 384, 448, 512, 576, 704, 768, 832])
def test_units_of_every_length_come_in_time(width, clusters, op):
    check(op, on_gpu(skewed()), width, width, torch.bfloat16, backend=BY_CLAIM[True, clusters])


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("clusters", [FEW, TOO_MANY])
def test_tiles_of_which_both_warpgroups_compute_a_part_are_claimed_too(clusters, op):
    form = {"down": KernelForm.rows_matmul_k_major, "dx": KernelForm.rows_matmul_n_major}.get(op) or KernelForm(op)
    gated, backward = form.halves == 2, form is KernelForm.down_backward
    changes = {
        "columns": 256,
        "ping_pong": False,
        "stages": 3 if backward else 4,
        "store_columns": 32,
        "store_sets": 1 if gated else 2,
        "cuts_last_column": False,
        "load_stages": 2 if backward else 0,
        "store_rows": None,
    }
    backend = backend_of(clusters, **changes)
    assert why_invalid(form, backend._choose(form, 1024, 832, 250), "sm90") is None
    for D, N in (EVEN, (832, 1024)):
        check(op, on_gpu(skewed()), D, N, torch.bfloat16, backend=backend)
    assert_counters_are_zero(backend)


OP_OF = {
    KernelForm.up: "up",
    KernelForm.rows_matmul_k_major: "down",
    KernelForm.rows_matmul_n_major: "dx",
    KernelForm.down_backward: "down_backward",
}
TABLE_TILES = {(entry["form"], str(entry["tile"])): entry for entry in table_entries()}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("entry", TABLE_TILES.values(), ids=lambda entry: f"{entry['form']}-{entry['shape']}")
def test_every_tile_of_the_table_is_right(entry, load):
    tile = TileConfig(**entry["tile"])
    backend = CuteSm90Backend(cache=BACKEND.cache, choose=lambda *widths: tile)
    plan = on_gpu(LOADS[load]())
    for D, N in (EVEN, TAILS, (832, 1024)):  # 1024 columns are five of 192 and part of a sixth, or four of 256
        check(OP_OF[KernelForm(entry["form"])], plan, D, N, torch.bfloat16, backend=backend)


def backend_with(schedule):
    """Return a backend whose weight gradients have ``schedule``, or the rule's."""

    def choose(form, contraction, columns, rows_per_expert):
        if schedule is None or not form.is_weight_grad:
            return choose_tile(form, contraction, columns, rows_per_expert)
        return weight_grad_tile(form, schedule)

    return CuteSm90Backend(cache=BACKEND.cache, choose=choose)


BY_SCHEDULE = {schedule: backend_with(schedule) for schedule in (None, *SCHEDULES)}
CLAIMING = [schedule for schedule in BY_SCHEDULE if schedule is None or "by number" not in schedule]


@pytest.mark.parametrize("op", WEIGHT_GRAD_OPS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("schedule", BY_SCHEDULE)
def test_weight_gradients_are_right_in_every_order_of_units(schedule, load, op):
    check(op, on_gpu(LOADS[load]()), *EVEN, torch.bfloat16, backend=BY_SCHEDULE[schedule])


@pytest.mark.parametrize("op", WEIGHT_GRAD_OPS)
@pytest.mark.parametrize(("D", "N"), [(1408, 200), (200, 1408), (2880, 136), (136, 2880), (128, 64)])
@pytest.mark.parametrize("schedule", CLAIMING)
def test_weight_gradients_are_right_with_an_odd_number_of_tiles(schedule, D, N, op):
    check(op, on_gpu(skewed()), D, N, torch.bfloat16, backend=BY_SCHEDULE[schedule])


def weight_grads_into(backend, batches, side, into):
    for t, plan in batches:
        left, right = (t.dout_TD, t.a_RN) if side is GatheredSide.left else (t.h_R2N, t.x_TD)
        assert backend.weight_grad(left, right, plan, gathered=side, into=into) is into
    return into


@pytest.mark.parametrize("side", GatheredSide)
@pytest.mark.parametrize("schedule", CLAIMING)
@pytest.mark.parametrize("widths", [EVEN, TAILS, (1408, 264), (64, 32)])
def test_sums_into_fp32_lose_less_than_bf16_gradients_summed_and_repeat_their_bits(widths, schedule, side):
    D, N = widths
    backend = BY_SCHEDULE[schedule]
    plans = [on_gpu(make()) for make in (skewed, rounded, lambda: route_top_k(random_probs(33, 16, seed=1), 2).plan)]
    batches = [(Inputs(plan, D, N, torch.bfloat16, seed=i), plan) for i, plan in enumerate(4 * plans)]
    shape = (16, D, N) if side is GatheredSide.left else (16, 2 * N, D)
    before = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with poisoned_memory():
        into = weight_grads_into(backend, batches, side, before.clone())
        again = weight_grads_into(backend, batches, side, before.clone())
    truth = weight_grads_into(REFERENCE, [(Wide(t), plan) for t, plan in batches], side, before.double())
    rounded_sum = before.clone()
    for t, plan in batches:
        left, right = (t.dout_TD, t.a_RN) if side is GatheredSide.left else (t.h_R2N, t.x_TD)
        rounded_sum += backend.weight_grad(left, right, plan, gathered=side)
    error, rounded_error = ((total - truth).abs().max().item() for total in (into, rounded_sum))
    # Tensor cores add what they multiply with a few bits less than fp32 has.
    assert error <= 1e-5 * truth.abs().max().item()
    assert error < rounded_error / 10
    assert torch.equal(into, again), "not the same bits twice"


def test_experts_without_rows_leave_what_is_added_to_as_it_was():
    plan = plan_with_counts([0, 200, 0, 64])
    inputs = Inputs(on_gpu(plan), *EVEN, torch.bfloat16)
    for schedule, backend in BY_SCHEDULE.items():
        for side, shape in ((GatheredSide.left, (4, 256, 192)), (GatheredSide.right, (4, 384, 256))):
            before = torch.randn(shape, device="cuda")
            into = weight_grads_into(backend, [(inputs, on_gpu(plan))], side, before.clone())
            assert torch.equal(into[[0, 2]], before[[0, 2]]), (schedule, side)
            assert bool((into[[1, 3]] != before[[1, 3]]).float().mean() > 0.99), (schedule, side)


@pytest.mark.parametrize("op", [*ROW_OPS, *WEIGHT_GRAD_OPS])
def test_units_are_claimed_in_graphs_and_on_two_streams_at_once(op):
    plan = on_gpu(LOADS["heavy expert last"]())
    inputs = Inputs(plan, *EVEN, torch.bfloat16)

    def step():
        return run(BACKEND, op, inputs, plan)

    expected = step()
    torch.cuda.synchronize()
    graphs, captured = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(step())
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(step())
            graphs[i % 2].replay()
    torch.cuda.synchronize()
    for results in (*outputs, *captured):
        assert all(torch.equal(result, same) for result, same in zip(results, expected, strict=True))
    assert len(BACKEND._counters) >= 3
    assert_counters_are_zero(BACKEND)
