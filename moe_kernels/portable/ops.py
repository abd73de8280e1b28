"""The ops with F.grouped_mm, index_select and embedding_bag: any CPU and any GPU, no atomics.

It materialises the gathered rows that the fused backends never write. The contract of each op is dispatch.Backend's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.problem import MoEProblem
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.scores import gather_scores, scatter_dscore
from moe_kernels.side import GatheredSide
from moe_kernels.swiglu import DownGrads, swiglu, swiglu_backward

_ROW_ALIGNMENT_BYTES = 16  # F.grouped_mm refuses other row strides


class PortableBackend:
    """The ops on torch's grouped matrix product, which neither reads nor writes rows past the last offset."""

    name = "portable"
    tile_m = 1

    def why_not(self, problem: MoEProblem) -> str | None:
        """Return the first reason why F.grouped_mm cannot run ``problem``, or None."""
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"F.grouped_mm takes float32, bfloat16 and float16, not {problem.dtype}"
        multiple = _ROW_ALIGNMENT_BYTES // problem.dtype.itemsize
        for name, width in (("D", problem.D), ("N", problem.N)):
            if width % multiple != 0:
                return (
                    f"{name}={width} is not a multiple of {multiple}: F.grouped_mm needs rows of a multiple of "
                    f"{_ROW_ALIGNMENT_BYTES} bytes"
                )
        return None

    def up(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
        """Return h_R2N and a_RN = SwiGLU(h) of the gathered rows."""
        h_R2N = self.rows_matmul(x_TD.index_select(0, plan.token_R), w_gate_up.transpose(1, 2), plan)
        return h_R2N, swiglu(h_R2N)

    def up_inference(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> Tensor:
        """Return a_RN alone."""
        return self.up(x_TD, w_gate_up, plan)[1]

    def rows_matmul(self, rows_RX: Tensor, w_EXY: Tensor, plan: RoutingPlan) -> Tensor:
        """Return (R, Y): each expert's rows times its matrix."""
        return F.grouped_mm(rows_RX, w_EXY, offs=plan.expert_offsets_E1[1:])

    def gather_scores(self, score_TE: Tensor, plan: RoutingPlan) -> Tensor:
        """Return score_R, the score of each row's pair."""
        return gather_scores(score_TE, plan)

    def combine(self, rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
        """Return (T, D): each token's rows, weighted if scores are given, summed in the order of row_by_token_R."""
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        weight_R = None if score_R is None else score_R.index_select(0, plan.row_by_token_R).to(wide)
        # The offsets of T tokens have T + 1 entries: as starts of bags they make one bag more, of the unused entries,
        # and what it sums is cut off. (include_last_offset would drop that bag, but not every kernel honours the end.)
        bags = F.embedding_bag(
            plan.row_by_token_R, rows_RD.to(wide), plan.token_offsets_T1, mode="sum", per_sample_weights=weight_R
        )
        return bags[: plan.T].to(rows_RD.dtype)

    def down_backward(
        self, dout_TD: Tensor, h_R2N: Tensor, w_down: Tensor, score_R: Tensor, plan: RoutingPlan
    ) -> DownGrads:
        """Return dh_R2N, scaled_a_RN and dscore_TE from the gathered rows of ``dout_TD``."""
        da_RN = self.rows_matmul(dout_TD.index_select(0, plan.token_R), w_down, plan)
        dh_R2N, scaled_a_RN, dscore_R = swiglu_backward(da_RN, h_R2N, score_R)
        return DownGrads(dh_R2N, scaled_a_RN, scatter_dscore(dscore_R, plan))

    def weight_grad(
        self, left: Tensor, right: Tensor, plan: RoutingPlan, *, gathered: GatheredSide, into: Tensor | None = None
    ) -> Tensor:
        """Return (E, left's width, right's width): Σ over an expert's rows of the outer product of the two sides.

        With ``into`` (fp32, 4 bytes for each of its values) the sums are added to it and it is returned.
        """
        if gathered is GatheredSide.left:
            left = left.index_select(0, plan.token_R)
        else:
            right = right.index_select(0, plan.token_R)
        if into is None:
            return F.grouped_mm(left.t(), right, offs=plan.expert_offsets_E1[1:])
        # The products' dtype is the operands': to keep them unrounded, the rows are widened.
        return into.add_(F.grouped_mm(left.to(into.dtype).t(), right.to(into.dtype), offs=plan.expert_offsets_E1[1:]))
