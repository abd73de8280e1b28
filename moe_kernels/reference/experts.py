"""The routed expert MLP as a loop over experts, differentiated by autograd. The ground truth of every other way."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.routing.plan import RoutingPlan


def moe_experts_ref(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, score_TE: Tensor, plan: RoutingPlan) -> Tensor:
    """Return out_TD with out[t] = Σ over t's rows r of score[t, e(r)] · w_down[e] (silu(gate) · up), row by row.

    Any dtype and device; waits for the device. Products run in the dtype of ``x_TD``; the sum over a token's experts
    runs in the dtype of ``score_TE`` or wider.
    """
    out_TD = torch.zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, score_TE.dtype), device=x_TD.device)
    offsets = plan.expert_offsets_E1.tolist()
    for expert in range(plan.E):
        token = plan.token_R[offsets[expert] : offsets[expert + 1]].long()
        gate, up = (x_TD[token] @ w_gate_up[expert].t()).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w_down[expert].t()
        out_TD = out_TD.index_add(0, token, (score_TE[token, expert, None] * y).to(out_TD.dtype))
    return out_TD.to(x_TD.dtype)
