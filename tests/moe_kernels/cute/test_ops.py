"""The Hopper backend as any machine sees it: it says why it cannot run, and importing it needs torch alone."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe_kernels.cute.compile
import moe_kernels.cute.ops
import moe_kernels.scores
from moe_kernels import MoEProblem, RoutingKind
from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.cute.tiles import KernelForm
from moe_kernels.routing.expert_choice import route_expert_choice
from moe_kernels.routing.top_k import route_top_k
from moe_kernels.side import GatheredSide
from moe_kernels.testing import random_probs

PROBLEM = MoEProblem(
    T=4096, D=2048, N=1024, E=64, K=8, tile_m=128, routing=RoutingKind.token_rounding, dtype=torch.bfloat16, arch="sm90"
)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(moe_kernels.cute.ops, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "cpu"}, "sm90.*not cpu"),
        ({"arch": "sm100"}, "not sm100"),
        ({"dtype": torch.float32}, "float32"),
        ({"D": 2044}, "D=2044 is not a multiple of 8"),
        ({"N": 1020}, "N=1020 is not a multiple of 8"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_it_cannot_run_is_refused_with_the_number_in_words(change, words):
    assert re.search(words, CuteSm90Backend().why_not(replace(PROBLEM, **change)) or "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("change", [{}, {"dtype": torch.float16}, {"D": 2880, "N": 2880}, {"N": 200}, {"E": 1024}])
def test_what_it_can_run_is_not_refused(change):
    assert CuteSm90Backend().why_not(replace(PROBLEM, **change)) is None


@pytest.mark.parametrize(("module", "package"), [("cutlass", "nvidia-cutlass-dsl"), ("triton", "triton")])
def test_a_missing_package_is_named(monkeypatch, module, package):
    monkeypatch.setattr(moe_kernels.cute.ops, "find_spec", lambda name: None if name == module else name)
    assert f"{package} is not installed" in (CuteSm90Backend().why_not(PROBLEM) or "")


def test_importing_the_package_imports_no_compiler():
    program = "import sys, moe_kernels; sys.exit(any(m in sys.modules for m in ('cutlass', 'triton')))"
    subprocess.run([sys.executable, "-c", program], check=True)


class Launches:
    """Stands for the cache of compiled kernels: keeps what was asked for, and with which arguments it was called."""

    def __init__(self):
        self.keys, self.calls = [], []

    def get(self, key, beside=()):
        self.keys.append(key)
        return lambda *arguments: self.calls.append((key, arguments))


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(CuteSm90Backend, "_clusters", lambda self, device: 66)
    monkeypatch.setattr(CuteSm90Backend, "_counter", lambda self, device: torch.zeros(1, dtype=torch.int32))
    in_torch = SimpleNamespace(
        gather_scores=moe_kernels.scores.gather_scores,
        scatter_dscore=lambda part_RX, plan: moe_kernels.scores.scatter_dscore(part_RX.sum(1), plan),
    )
    monkeypatch.setitem(sys.modules, "moe_kernels.triton.scores", in_torch)  # triton may not be installed
    return CuteSm90Backend(cache=Launches())


def run_all(backend, T, E=4, D=64, N=32):
    """Run every op but the sums, on the CPU, where nothing is computed."""
    plan = route_top_k(random_probs(T, E, seed=0), 2).plan
    x_TD, w_gate_up, w_down = torch.zeros(T, D), torch.zeros(E, 2 * N, D), torch.zeros(E, D, N)
    h_R2N, a_RN = backend.up(x_TD, w_gate_up, plan)
    backend.up_inference(x_TD, w_gate_up, plan)
    y_RD = backend.rows_matmul(a_RN, w_down.transpose(1, 2), plan)
    dx_RD = backend.rows_matmul(h_R2N, w_gate_up, plan)
    score_R = backend.gather_scores(torch.zeros(T, E), plan)
    grads = backend.down_backward(x_TD, h_R2N, w_down, score_R, plan)
    dw_down = backend.weight_grad(x_TD, grads.scaled_a_RN, plan, gathered=GatheredSide.left)
    dw_gate_up = backend.weight_grad(grads.dh_R2N, x_TD, plan, gathered=GatheredSide.right)
    R = plan.R
    assert (h_R2N.shape, a_RN.shape) == ((R, 2 * N), (R, N))
    assert y_RD.shape == dx_RD.shape == (R, D)
    assert (grads.dh_R2N.shape, grads.scaled_a_RN.shape, grads.dscore_TE.shape) == ((R, 2 * N), (R, N), (T, E))
    assert (dw_down.shape, dw_gate_up.shape) == (w_down.shape, w_gate_up.shape)


def test_each_op_asks_for_the_kernel_of_its_widths(backend):
    run_all(backend, T=16)
    asked = {(key.form, key.contraction, key.columns) for key in backend.cache.keys}
    assert asked == {
        (KernelForm.up, 64, 32),
        (KernelForm.up_inference, 64, 32),
        (KernelForm.rows_matmul_k_major, 32, 64),
        (KernelForm.rows_matmul_n_major, 64, 64),
        (KernelForm.down_backward, 64, 32),
        (KernelForm.weight_grad_left, 64, 32),
        (KernelForm.weight_grad_right, 64, 64),
    }
    for _, arguments in backend.cache.calls:
        assert arguments[-1] == 66
        assert arguments[-2].dtype == torch.int32, "the counter from which clusters claim units"
        assert arguments[-2].shape == (1,)
        tensors = [tensor for group in arguments[:-1] for tensor in (group if isinstance(group, tuple) else (group,))]
        assert all(tensor.is_contiguous() for tensor in tensors), "kernels are compiled for contiguous tensors"


def test_the_first_load_chooses_the_tiles_and_later_ones_ask_for_nothing(backend):
    run_all(backend, T=4096)
    asked, launched = len(backend.cache.keys), len(backend.cache.calls)
    run_all(backend, T=16)
    run_all(backend, T=3)
    assert len(backend.cache.keys) == asked
    assert len(backend.cache.calls) == 3 * launched


def test_no_rows_launch_nothing_and_give_zero_gradients(backend):
    plan = route_expert_choice(random_probs(3, 4, seed=0), 1).plan  # fewer tokens than experts: none is taken
    assert plan.R == 0
    h_R2N, _ = backend.up(torch.zeros(3, 64), torch.zeros(4, 64, 64), plan)
    grad = backend.weight_grad(h_R2N, torch.zeros(3, 64), plan, gathered=GatheredSide.right)
    assert h_R2N.shape == (0, 64)
    assert not bool(grad.any())
    assert backend.cache.calls == []


@pytest.mark.parametrize("gathered", GatheredSide)
def test_adding_to_a_tensor_is_a_kernel_of_its_own_and_touches_no_other_memory(backend, gathered):
    plan = route_top_k(random_probs(16, 4, seed=0), 2).plan
    tokens, rows = torch.zeros(plan.T, 64), torch.zeros(plan.R, 32)
    left, right = (tokens, rows) if gathered is GatheredSide.left else (rows, tokens)
    into = torch.full((4, left.shape[1], right.shape[1]), 2.0)
    for _ in range(2):
        assert backend.weight_grad(left, right, plan, gathered=gathered, into=into) is into
    assert backend.weight_grad(left, right, plan, gathered=gathered) is not into
    names = [key.form.value for key in backend.cache.keys]
    assert names == [f"weight_grad_{gathered.value}_into", f"weight_grad_{gathered.value}"]
    grads = [arguments[4] for _, arguments in backend.cache.calls]
    assert [grad is into for grad in grads] == [True, True, False]
    none = route_expert_choice(random_probs(3, 4, seed=0), 1).plan
    assert backend.weight_grad(left[:0], right[:0], none, gathered=gathered, into=into) is into
    assert bool((into == 2.0).all())
    assert len(backend.cache.calls) == 3
