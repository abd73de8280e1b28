"""The ops on Hopper: CuTe-DSL kernels for the matrix products, Triton for the gather-sum and for scores.

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
from moe_kernels.swiglu import DownGrads

_ARCH = "sm90"
_CLUSTER = 2
_WIDTH_MULTIPLE = 8  # elements of 16 bytes, the unit of TMA's strides and of cp.async

TileChoice = Callable[[KernelForm, int, int, int], TileConfig]  # (form, contraction, columns, rows per expert)


class CuteSm90Backend:
    """The ops. Kernels are compiled, or read from disk, when a width is first seen; never for new row counts.

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
        self._counters: dict[tuple[torch.device, int], Tensor] = {}

    def why_not(self, problem: MoEProblem) -> str | None:
        """Return the first reason why the kernels cannot run ``problem``, or None."""
        if problem.arch != _ARCH:
            return f"its kernels are for {_ARCH} (H100, H200), not {problem.arch}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, not {problem.dtype}"
        for name, width in (("D", problem.D), ("N", problem.N)):
            if width % _WIDTH_MULTIPLE != 0:
                return f"{name}={width} is not a multiple of {_WIDTH_MULTIPLE}, and rows must be multiples of 16 bytes"
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

    def gather_scores(self, score_TE: Tensor, plan: RoutingPlan) -> Tensor:
        """Return score_R, the score of each row's pair."""
        from moe_kernels.triton.scores import gather_scores  # noqa: PLC0415 - triton is not on every machine

        return gather_scores(score_TE, plan)

    def combine(self, rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
        """Return (T, D): each token's rows, weighted if scores are given, summed in the order of row_by_token_R."""
        from moe_kernels.triton.combine import combine_rows  # noqa: PLC0415 - triton is not on every machine

        return combine_rows(rows_RD, score_R, plan)

    def down_backward(
        self, dout_TD: Tensor, h_R2N: Tensor, w_down: Tensor, score_R: Tensor, plan: RoutingPlan
    ) -> DownGrads:
        """Return dh_R2N, scaled_a_RN and dscore_TE: one kernel, and one that sums and scatters dscore's parts."""
        from moe_kernels.triton.scores import scatter_dscore  # noqa: PLC0415 - triton is not on every machine

        D, N = w_down.shape[1:]
        dh_R2N, scaled_a_RN = torch.empty_like(h_R2N), h_R2N.new_empty(plan.R, N)
        tile = self._tile(KernelForm.down_backward, D, N, plan)
        part_RX = score_R.new_empty(plan.R, -(-N // tile.columns), dtype=torch.float32)
        tensors = (dh_R2N, scaled_a_RN, part_RX, h_R2N, score_R)
        self._run_rows(KernelForm.down_backward, D, N, dout_TD, w_down, tensors, plan)
        return DownGrads(dh_R2N, scaled_a_RN, scatter_dscore(part_RX, plan))

    def weight_grad(
        self, left: Tensor, right: Tensor, plan: RoutingPlan, *, gathered: GatheredSide, into: Tensor | None = None
    ) -> Tensor:
        """Return (E, left's width, right's width): Σ over an expert's rows of the outer product of the two sides.

        With ``into`` (fp32, 4 bytes for each of its values) the sums are added to it and it is returned.
        """
        X, Y = left.shape[1], right.shape[1]
        if plan.R == 0:
            return left.new_zeros(plan.E, X, Y) if into is None else into
        grad_EXY = left.new_empty(plan.E, X, Y) if into is None else into
        form = KernelForm[f"weight_grad_{gathered.value}{'' if into is None else '_into'}"]
        kernel = self._kernel(form, X, Y, left.dtype, plan)
        device = left.device
        arguments = (left, right, plan.token_R, plan.expert_offsets_E1, grad_EXY)
        kernel(*arguments, self._counter(device), self._clusters(device))
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
        device = rows.device
        arguments = (rows, weights, plan.token_R, plan.expert_offsets_E1, tensors)
        kernel(*arguments, self._counter(device), self._clusters(device))

    def _kernel(
        self, form: KernelForm, contraction: int, columns: int, dtype: torch.dtype, plan: RoutingPlan
    ) -> Callable[..., None]:
        widths = (form, contraction, columns, dtype, plan.E)
        kernel = self._kernels.get(widths)
        if kernel is None:
            # Only forms that begin a layer have followers, and their widths are the layer's.
            followers = [(f, *f.widths(contraction, columns)) for f in form.followers]
            key, *beside = (
                KernelKey(form=f, contraction=X, columns=Y, dtype=dtype, arch=_ARCH, tile=self._tile(f, X, Y, plan))
                for f, X, Y in [(form, contraction, columns), *followers]
            )
            kernel = self._kernels[widths] = self.cache.get(key, beside)
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

    def _counter(self, device: torch.device) -> Tensor:
        """Return a zero (1,) int32 for a kernel that leaves it at zero and runs beside no other that has it.

        A stream's kernels run one after the other, so they share one. A graph may run beside anything: each kernel in
        it gets its own, which the graph zeroes.
        """
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        if key not in self._counters:
            self._counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._counters[key]
