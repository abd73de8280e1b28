"""Which backend computes the layer: one explicit choice at model build, logged with its refusals.

This is the only place that asks what device this is. How to write a backend: docs/adding_a_backend.md.
"""

import logging
from enum import Enum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.portable.ops import PortableBackend
from moe_kernels.problem import MoEProblem
from moe_kernels.reference.ops import ReferenceBackend
from moe_kernels.routing.kinds import RoutingKind
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.side import GatheredSide
from moe_kernels.swiglu import DownGrads

log = logging.getLogger(__name__)


class BackendName(Enum):
    """The names that configs/kernels/ may ask for."""

    auto = "auto"  # the first of the others, fastest first, that runs the problem
    reference = "reference"  # loops in plain torch: slow, any dtype
    portable = "portable"  # torch's grouped matrix products: any CPU or GPU
    cute_sm90 = "cute_sm90"  # CuTe kernels for Hopper
    cute_sm100 = "cute_sm100"  # CuTe kernels for Blackwell


class KernelUnavailable(RuntimeError):  # noqa: N818 - it names a condition of the machine or the version, as its message does
    """No backend that was allowed can run the problem on this machine with this version."""


class Backend(Protocol):
    """The ops. Rows past ``plan.expert_offsets_E1[-1]`` are unused: an op may leave anything in such rows of an
    output, and must not let such rows of an input reach anything else. Inputs are contiguous, or transposed views of
    contiguous tensors where said. Sums and activations run in fp32 or wider; outputs have the dtype of the inputs.
    """

    @property
    def name(self) -> str:
        """The backend's name, the value of its BackendName."""

    @property
    def tile_m(self) -> int:
        """Rows in a tile of its kernels: token rounding saves work only if its tile is a multiple of this."""

    def __hash__(self) -> int:
        """As of any object: what is asked of a backend is remembered by it."""

    def why_not(self, problem: MoEProblem) -> str | None:
        """Return why it cannot run ``problem``, in words and with the number that is wrong, or None if it can."""

    def up(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
        """Return h_R2N = w_gate_up[e] x[token] with columns [gate | up], and a_RN = silu(gate)·up."""

    def up_inference(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> Tensor:
        """Return a_RN alone, as ``up`` does: for a forward that keeps no h."""

    def rows_matmul(self, rows_RX: Tensor, w_EXY: Tensor, plan: RoutingPlan) -> Tensor:
        """Return (R, Y), row r being rows[r] @ w[e(r)]. ``w_EXY`` may be a transposed view."""

    def gather_scores(self, score_TE: Tensor, plan: RoutingPlan) -> Tensor:
        """Return score_R, the score of each row's pair (token, expert)."""

    def combine(self, rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
        """Return (T, D), each token's rows summed in the order of row_by_token_R, weighted if scores are given.

        Every token is written, zeros where it has no row. No atomics: the result is the same bits every time.
        """

    def down_backward(
        self, dout_TD: Tensor, h_R2N: Tensor, w_down: Tensor, score_R: Tensor, plan: RoutingPlan
    ) -> DownGrads:
        """Return dh_R2N, scaled_a_RN = score·a and dscore_TE, ⟨dout[token] w_down[e], a⟩ in the pair's place.

        ``dscore_TE`` has the dtype of the scores; all of it is written, zeros for pairs that are not in the plan.
        """

    def weight_grad(
        self, left: Tensor, right: Tensor, plan: RoutingPlan, *, gathered: GatheredSide, into: Tensor | None = None
    ) -> Tensor:
        """Return (E, X, Y) with Σ over the rows r of expert e of left[r]ᵀ right[r], zeros where it has none.

        The gathered side is (T, ·) and read through token_R; the other is (R, ·).

        With ``into`` (E, X, Y), fp32 (fp64 where the backend runs in it), the sums are added to it unrounded and it is
        returned; an expert without rows adds nothing. Nothing else is allocated. Gradients of many micro-batches then
        lose nothing to rounding, for 4·E·X·Y bytes that live as long as the accumulation does.
        """


# Fastest first: the order in which auto asks. Kernels for cute_sm100 are not part of this version.
BACKENDS: dict[BackendName, Backend] = {
    BackendName.cute_sm90: CuteSm90Backend(),
    BackendName.portable: PortableBackend(),
    BackendName.reference: ReferenceBackend(),
}


def resolve_backend(name: BackendName, problem: MoEProblem) -> Backend:
    """Return the backend that ``name`` allows and that can run ``problem``; log the choice and every refusal.

    Raises: KernelUnavailable if there is none, saying why each was refused.
    """
    if name is not BackendName.auto and name not in BACKENDS:
        raise KernelUnavailable(
            f"kernels.backend={name.value} is not built yet: this version has "
            f"{', '.join(backend.value for backend in BACKENDS)}. Use kernels.backend=auto for the fastest that runs."
        )
    refusals: dict[str, str] = {}
    for backend in BACKENDS.values() if name is BackendName.auto else [BACKENDS[name]]:
        reason = backend.why_not(problem)
        if reason is None:
            # A CPU never runs the kernels of a GPU; any other refusal makes the run slower than it could be.
            news = refusals if problem.arch != "cpu" else refusals.keys() - {BackendName.cute_sm90.value}
            level = logging.WARNING if news else logging.INFO
            log.log(level, "moe backend: %s for %s (refused: %s)", backend.name, problem, refusals or "none")
            return backend
        refusals[backend.name] = reason
    raise KernelUnavailable(
        f"no MoE backend for kernels.backend={name.value}, {problem}: {refusals}. "
        "Use kernels.backend=auto for the fastest that runs, or other values of train.precision (dtype), model.width "
        "(D) or model.moe.expert_width (N)."
    )


@cache
def check_runs(backend: Backend, *, D: int, N: int, E: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``KernelUnavailable`` with the backend's reason if it cannot run such a layer; asked once for each kind.

    For callers that did not ask ``resolve_backend``. T, K and how the plan came about are left open: a plan does not
    say, and no backend judges by them.
    """
    problem = MoEProblem(
        T=1, D=D, N=N, E=E, K=1, tile_m=1, routing=RoutingKind.top_k, dtype=dtype, arch=arch_of(device)
    )
    reason = backend.why_not(problem)
    if reason is not None:
        raise KernelUnavailable(f"the backend {backend.name} cannot run D={D}, N={N}, {dtype} on {device}: {reason}")


def arch_of(device: torch.device) -> str:
    """Return what ``MoEProblem.arch`` calls a device: ``"cpu"``, or ``"sm90"`` and the like for CUDA devices."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
