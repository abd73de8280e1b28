"""The ops as loops over experts in plain torch: the twin that every backend is tested against.

Any dtype, fp64 included, and any device; waits for the device. The contract of each op is dispatch.Backend's.
"""

import torch
from torch import Tensor

from moe_kernels.problem import MoEProblem
from moe_kernels.routing.plan import RoutingPlan
from moe_kernels.scores import gather_scores, scatter_dscore
from moe_kernels.side import GatheredSide
from moe_kernels.swiglu import DownGrads, swiglu, swiglu_backward


class ReferenceBackend:
    """The ops, slow and right. Unused rows of every output are left uninitialised, as in the fast backends."""

    name = "reference"
    tile_m = 1

    def why_not(self, problem: MoEProblem) -> str | None:
        """Return None: it runs any problem."""
        return None

    def up(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
        """Return h_R2N and a_RN = SwiGLU(h) of the gathered rows."""
        h_R2N = x_TD.new_empty(plan.R, w_gate_up.shape[1])
        a_RN = x_TD.new_empty(plan.R, w_gate_up.shape[1] // 2)
        for expert, rows in _expert_rows(plan):
            h_R2N[rows] = x_TD[plan.token_R[rows].long()] @ w_gate_up[expert].t()
            a_RN[rows] = swiglu(h_R2N[rows])
        return h_R2N, a_RN

    def up_inference(self, x_TD: Tensor, w_gate_up: Tensor, plan: RoutingPlan) -> Tensor:
        """Return a_RN alone."""
        return self.up(x_TD, w_gate_up, plan)[1]

    def rows_matmul(self, rows_RX: Tensor, w_EXY: Tensor, plan: RoutingPlan) -> Tensor:
        """Return (R, Y): each expert's rows times its matrix."""
        out_RY = rows_RX.new_empty(plan.R, w_EXY.shape[2])
        for expert, rows in _expert_rows(plan):
            out_RY[rows] = rows_RX[rows] @ w_EXY[expert]
        return out_RY

    def gather_scores(self, score_TE: Tensor, plan: RoutingPlan) -> Tensor:
        """Return score_R, the score of each row's pair."""
        return gather_scores(score_TE, plan)

    def combine(self, rows_RD: Tensor, score_R: Tensor | None, plan: RoutingPlan) -> Tensor:
        """Return (T, D): each token's rows, weighted if scores are given, summed in the order of row_by_token_R."""
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        out_TD = torch.zeros(plan.T, rows_RD.shape[1], dtype=wide, device=rows_RD.device)
        for _, rows in _expert_rows(plan):  # a token occurs once among an expert's rows, and experts come in order
            weighted = rows_RD[rows].to(wide)
            if score_R is not None:
                weighted = score_R[rows, None] * weighted
            out_TD.index_add_(0, plan.token_R[rows].long(), weighted)
        return out_TD.to(rows_RD.dtype)

    def down_backward(
        self, dout_TD: Tensor, h_R2N: Tensor, w_down: Tensor, score_R: Tensor, plan: RoutingPlan
    ) -> DownGrads:
        """Return dh_R2N, scaled_a_RN and dscore_TE from the gathered rows of ``dout_TD``."""
        dh_R2N, scaled_a_RN = torch.empty_like(h_R2N), h_R2N.new_empty(plan.R, w_down.shape[2])
        dscore_R = torch.empty_like(score_R)
        for expert, rows in _expert_rows(plan):
            da = dout_TD[plan.token_R[rows].long()] @ w_down[expert]
            dh_R2N[rows], scaled_a_RN[rows], dscore_R[rows] = swiglu_backward(da, h_R2N[rows], score_R[rows])
        return DownGrads(dh_R2N, scaled_a_RN, scatter_dscore(dscore_R, plan))

    def weight_grad(
        self, left: Tensor, right: Tensor, plan: RoutingPlan, *, gathered: GatheredSide, into: Tensor | None = None
    ) -> Tensor:
        """Return (E, left's width, right's width): Σ over an expert's rows of the outer product of the two sides.

        With ``into`` (fp32, 4 bytes for each of its values) the sums are added to it and it is returned.
        """
        grad = left.new_zeros(plan.E, left.shape[1], right.shape[1]) if into is None else into
        for expert, rows in _expert_rows(plan):
            token = plan.token_R[rows].long()
            left_rows = left[token] if gathered is GatheredSide.left else left[rows]
            right_rows = right[token] if gathered is GatheredSide.right else right[rows]
            grad[expert] += left_rows.to(grad.dtype).t() @ right_rows.to(grad.dtype)
        return grad


def _expert_rows(plan: RoutingPlan) -> list[tuple[int, slice]]:
    """Return each expert with the slice of rows that it owns."""
    offsets = plan.expert_offsets_E1.tolist()
    return [(expert, slice(offsets[expert], offsets[expert + 1])) for expert in range(plan.E)]
