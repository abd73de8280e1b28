"""The five ops on Hopper: CuTe-DSL kernels for the matrix products, Triton for the gather-sum.

Here are the outputs' allocation and the choice of kernel; the kernels are in sm90/. Importing this needs torch alone.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_kernels.cute.compile import KernelCache, KernelKey, default_cache_folder
from moe_kernels.cute.tiles import TILE_ROWS, KernelForm, TileConfig, choose_tile
from moe_kernels.problem import MoEProblem
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.side import GatheredSide
from moe_kernels.swiglu import SwiGLUGrads

_ARCH = "sm90"
_CLUSTER = 2
_WIDTH_MULTIPLE = 8  # elements of 16 bytes, the unit of TMA's strides and of cp.async
_SMALLEST_WIDTH = 136  # that was run; at D=128, N=64 the gradient of w_down came out as zero on an H200

TileChoice = Callable[[KernelForm, int, int, int], TileConfig]  # (form, contraction, columns, rows per expert)


class CuteSm90Backend:
    """The five ops. Kernels are compiled, or read from disk, when a width is first seen; never for new row counts.

    ``choose`` picks the tiles, once for each form and pair of widths.
    """

    name = "cute_sm90"
    tile_m = TILE_ROWS

    def __init__(self, *, cache: KernelCache | None = None, choose: TileChoice | None = None) -> None:
        self.cache = cache or KernelCache(default_cache_folder())
        self._choose = choose or choose_tile
        self._tiles: dict[tuple, TileConfig] = {}
        self._kernels: dict[tuple, Callable[..., None]] = {}
        self._num_clusters: dict[torch.device, int] = {}

    def why_not(self, problem: MoEProblem) -> str | None:
        """Return the first reason why the kernels cannot run ``problem``, or None."""
        if problem.arch != _ARCH:
            return f"its kernels are for {_ARCH} (H100, H200), not {problem.arch}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, not {problem.dtype}"
        for name, width in (("D", problem.D), ("N", problem.N)):
            if width % _WIDTH_MULTIPLE != 0:
                return f"{name}={width} is not a multiple of {_WIDTH_MULTIPLE}, and rows must be multiples of 16 bytes"
            if width < _SMALLEST_WIDTH:
                return f"{name}={width} is below {_SMALLEST_WIDTH}, and its kernels are not right at small widths"
        for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi"), ("triton", "triton")):
            if find_spec(module) is None:
                return f"{package} is not installed (pip install 'gristmill[cute]')"
        return None

    def up(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
        """Return h_R2N and a_RN = SwiGLU(h) of the gathered rows."""
        D, N = x_TD.shape[1], w_gate_up.shape[1] // 2
        h_R2N, a_RN = x_TD.new_empty(plan.R, 2 * N), x_TD.new_empty(plan.R, N)
        self._run_rows(KernelForm.up, D, N, x_TD, w_gate_up, (h_R2N, a_RN), plan)
        return h_R2N, a_RN

    def up_inference(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> Tensor:
        """Return a_RN alone, for a forward without a backward: h is never written."""
        D, N = x_TD.shape[1], w_gate_up.shape[1] // 2
        a_RN = x_TD.new_empty(plan.R, N)
        self._run_rows(KernelForm.up_inference, D, N, x_TD, w_gate_up, (a_RN,), plan)
        return a_RN

    def rows_matmul(self, rows_RX: Tensor, w_EXY: Tensor, plan: RoutingPlan) -> Tensor:
        """Return (R, Y): each expert's rows times its matrix, which is contiguous or the transpose of one that is."""
        _, X, Y = w_EXY.shape
        out_RY = rows_RX.new_empty(plan.R, Y)
        if w_EXY.is_contiguous():
            self._run_rows(KernelForm.rows_matmul_n_major, X, Y, rows_RX, w_EXY, (out_RY,), plan)
        else:
            self._run_rows(KernelForm.rows_matmul_k_major, X, Y, rows_RX, w_EXY.transpose(1, 2), (out_RY,), plan)
        return out_RY

    def combine(self, rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
        """Return (T, D): each token's rows, weighted if scores are given, summed in the order of row_by_token_R."""
        from moe_kernels.triton.combine import combine_rows  # noqa: PLC0415 - triton is not on every machine

        return combine_rows(rows_RD, score_R, plan)

    def down_backward(
        self, dout_TD: Tensor, h_R2N: Tensor, w_down: Tensor, score_R: Tensor, plan: RoutingPlan
    ) -> SwiGLUGrads:
        """Return dh_R2N, scaled_a_RN and dscore_R, in one kernel but for the sum of dscore over column tiles."""
        D, N = w_down.shape[1:]
        dh_R2N, scaled_a_RN = torch.empty_like(h_R2N), h_R2N.new_empty(plan.R, N)
        tile = self._tile(KernelForm.down_backward, D, N, plan)
        parts = score_R.new_empty(plan.R, -(-N // tile.columns), dtype=torch.float32)
        tensors = (dh_R2N, scaled_a_RN, parts, h_R2N, score_R)
        self._run_rows(KernelForm.down_backward, D, N, dout_TD, w_down, tensors, plan)
        return SwiGLUGrads(dh_R2N, scaled_a_RN, parts.sum(1) if parts.shape[1] > 1 else parts[:, 0])

    def weight_grad(self, left: Tensor, right: Tensor, plan: RoutingPlan, *, gathered: GatheredSide) -> Tensor:
        """Return (E, left's width, right's width): Σ over an expert's rows of the outer product of the two sides."""
        X, Y = left.shape[1], right.shape[1]
        grad_EXY = left.new_empty(plan.E, X, Y)
        if plan.R == 0:
            return grad_EXY.zero_()
        is_left = gathered is GatheredSide.left
        form = KernelForm.weight_grad_left if is_left else KernelForm.weight_grad_right
        kernel = self._kernel(form, X, Y, left.dtype, plan)
        kernel(left, right, plan.token_R, plan.expert_offsets_E1, grad_EXY, self._clusters(left.device))
        return grad_EXY

    def _run_rows(
        self,
        form: KernelForm,
        contraction: int,
        columns: int,
        rows: Tensor,
        weights: Tensor,
        tensors: tuple[Tensor, ...],
        plan: RoutingPlan,
    ) -> None:
        if plan.R == 0:
            return
        kernel = self._kernel(form, contraction, columns, rows.dtype, plan)
        kernel(rows, weights, plan.token_R, plan.expert_offsets_E1, tensors, self._clusters(rows.device))

    def _kernel(
        self, form: KernelForm, contraction: int, columns: int, dtype: torch.dtype, plan: RoutingPlan
    ) -> Callable[..., None]:
        widths = (form, contraction, columns, dtype, plan.E)
        kernel = self._kernels.get(widths)
        if kernel is None:
            tile = self._tile(form, contraction, columns, plan)
            key = KernelKey(form=form, contraction=contraction, columns=columns, dtype=dtype, arch=_ARCH, tile=tile)
            kernel = self._kernels[widths] = self.cache.get(key)
        return kernel

    def _tile(self, form: KernelForm, contraction: int, columns: int, plan: RoutingPlan) -> TileConfig:
        """Return the tile for these widths; the rows per expert of the first call decide for all later ones."""
        key = (form, contraction, columns, plan.E)
        if key not in self._tiles:
            self._tiles[key] = self._choose(form, contraction, columns, plan.R // plan.E)
        return self._tiles[key]

    def _clusters(self, device: torch.device) -> int:
        if device not in self._num_clusters:
            properties = torch.cuda.get_device_properties(device)
            self._num_clusters[device] = properties.multi_processor_count // _CLUSTER
        return self._num_clusters[device]
