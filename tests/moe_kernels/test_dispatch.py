"""Dispatch: one choice, explained; what was named and cannot run is an error."""

import logging
from dataclasses import replace

import pytest
import torch

import moe_kernels
from moe_kernels import BackendName, KernelUnavailable, MoEProblem, RoutingKind, arch_of, resolve_backend
from moe_kernels.dispatch import BACKENDS

PROBLEM = MoEProblem(
    T=64, D=32, N=16, E=4, K=2, tile_m=8, routing=RoutingKind.token_rounding, dtype=torch.float32, arch="cpu"
)


def test_auto_takes_the_fastest_that_runs_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="moe_kernels.dispatch"):
        assert resolve_backend(BackendName.auto, PROBLEM).name == "portable"
    assert "moe backend: portable" in caplog.text


def test_auto_says_loudly_why_it_fell_back(caplog):
    with caplog.at_level(logging.WARNING, logger="moe_kernels.dispatch"):
        assert resolve_backend(BackendName.auto, replace(PROBLEM, dtype=torch.float64)).name == "reference"
    assert "portable" in caplog.text
    assert "float64" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"D": 15}, "D=15 is not a multiple of 4"),
        ({"N": 18}, "N=18 is not a multiple of 4"),
        ({"D": 12, "dtype": torch.bfloat16}, "D=12 is not a multiple of 8"),
        ({"N": 20, "dtype": torch.float16}, "N=20 is not a multiple of 8"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_a_named_backend_that_cannot_run_is_an_error_with_the_number_in_it(change, words):
    with pytest.raises(KernelUnavailable, match=words):
        resolve_backend(BackendName.portable, replace(PROBLEM, **change))
    assert resolve_backend(BackendName.reference, replace(PROBLEM, **change)).name == "reference"


def test_what_portable_refuses_torch_refuses():
    # If torch learns to run it, why_not is out of date.
    with pytest.raises(RuntimeError, match="16"):
        BACKENDS[BackendName.portable].rows_matmul(
            torch.zeros(8, 15), torch.zeros(1, 15, 16), moe_kernels.route_top_k(torch.zeros(8, 1), 1).plan
        )


@pytest.mark.parametrize(
    "name", [name for name in BackendName if name not in BACKENDS and name is not BackendName.auto]
)
def test_a_backend_that_this_version_lacks_is_named_with_those_it_has(name):
    with pytest.raises(KernelUnavailable, match=f"{name.value} is not built yet.*portable, reference"):
        resolve_backend(name, PROBLEM)


def test_backends_carry_the_names_that_ask_for_them():
    assert {name.value: backend.name for name, backend in BACKENDS.items()} == {
        backend.name: backend.name for backend in BACKENDS.values()
    }
    assert all(backend.tile_m >= 1 for backend in BACKENDS.values())


def test_the_cpu_has_its_own_name():
    assert arch_of(torch.device("cpu")) == "cpu"


def test_every_public_name_exists():
    assert all(hasattr(moe_kernels, name) for name in moe_kernels.__all__)
