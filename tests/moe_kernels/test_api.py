"""Arguments that do not fit each other are refused before anything runs, in words."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from moe_kernels import BackendName, MoEProblem, RoutingKind, moe_experts, resolve_backend, route_top_k
from moe_kernels.dispatch import BACKENDS, KernelUnavailable
from moe_kernels.portable.ops import PortableBackend
from moe_kernels.testing import random_layer, random_probs

PROB_TE = random_probs(6, 4, seed=0)
PLAN = route_top_k(PROB_TE, 2).plan
LAYER = random_layer(PROB_TE, D=8, N=4, dtype=torch.float32, seed=0)
PROBLEM = MoEProblem(T=6, D=8, N=4, E=4, K=2, tile_m=1, routing=RoutingKind.top_k, dtype=torch.float32, arch="cpu")
BACKEND = resolve_backend(BackendName.portable, PROBLEM)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x_TD": torch.zeros(5, 8)}, ValueError, "plan's T=6"),
        ({"x_TD": torch.zeros(2, 3, 8)}, ValueError, "x_TD has shape"),
        ({"x_TD": torch.zeros(6, 7)}, ValueError, r"w_down has shape \(4, 8, 4\), expected .* \(4, 7, N\)"),
        ({"w_gate_up": torch.zeros(4, 7, 8)}, ValueError, r"w_gate_up has shape \(4, 7, 8\).*\(4, 8, 8\)"),
        ({"w_down": torch.zeros(3, 8, 4)}, ValueError, "w_down has shape"),
        ({"score_TE": torch.zeros(6, 3)}, ValueError, r"score_TE has shape \(6, 3\)"),
        ({"score_TE": torch.zeros(6, 4).bfloat16()}, TypeError, "score_TE is torch.bfloat16, expected torch.float32"),
        ({"x_TD": torch.zeros(6, 8).bfloat16()}, TypeError, "w_gate_up is torch.float32, x_TD torch.bfloat16"),
        ({"w_down": torch.zeros(4, 4, 8).transpose(1, 2)}, ValueError, "contiguous"),
        ({"w_down": torch.zeros(4, 8, 4, device="meta")}, ValueError, "one device"),
    ],
)
def test_the_argument_that_does_not_fit_is_named(change, error, message):
    with pytest.raises(error, match=message):
        moe_experts(*LAYER._replace(**change), PLAN, backend=BACKEND)


def test_a_backend_that_is_not_in_the_table_is_refused():
    class Mine(PortableBackend):
        """A copy, whose ops would never be called: the layer finds those of its name."""

    for backend in (Mine(), "portable", BackendName.auto):
        with pytest.raises(ValueError, match=r"no value of moe_kernels.dispatch.BACKENDS \(cute_sm90, portable"):
            moe_experts(*LAYER, PLAN, backend=backend)


@pytest.mark.parametrize(
    ("name", "dtype", "N", "message"),
    [
        (BackendName.portable, torch.float32, 15, "N=15 is not a multiple of 4"),
        (BackendName.portable, torch.bfloat16, 12, "N=12 is not a multiple of 8"),
        (BackendName.portable, torch.float64, 16, "takes float32, bfloat16 and float16, not torch.float64"),
        (BackendName.cute_sm90, torch.bfloat16, 16, "for sm90 .*, not cpu"),
    ],
)
def test_what_the_backend_cannot_run_is_refused_in_its_words(name, dtype, N, message):
    tensors = random_layer(PROB_TE, D=8, N=N, dtype=dtype, seed=0)
    with pytest.raises(KernelUnavailable, match=f"the backend {name.value} cannot run D=8, N={N}.*{message}"):
        moe_experts(*tensors, PLAN, backend=BACKENDS[name])


def test_a_dtensor_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(LAYER.w_down.detach(), mesh, [Replicate()])
        with pytest.raises(TypeError, match="w_down is a DTensor"):
            moe_experts(*LAYER._replace(w_down=sharded), PLAN, backend=BACKEND)
    finally:
        torch.distributed.destroy_process_group()


def test_a_token_without_a_pair_gets_zeros():
    score_TE = LAYER.score_TE.detach()
    out_TD = moe_experts(*LAYER[:3], score_TE, route_top_k(PROB_TE, 2).plan, backend=BACKEND)
    assert (out_TD != 0).all(dim=-1).all()
