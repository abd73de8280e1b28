"""Runs each op of the Hopper kernels once on a few small experts, for a checker that makes kernels far slower.

    compute-sanitizer --tool racecheck --kernel-regex kns=kernel_cutlass python -m tests.moe_kernels.cute.run_ops_once
    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.moe_kernels.cute.run_ops_once up dx

Arguments are names of ops, by default all. Two clusters share the units, so that the queue between them is used.
"""

import sys

import torch

from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.routing.top_k import route_top_k
from moe_kernels.side import GatheredSide
from moe_kernels.testing import random_probs

D, N, T, E, K = 256, 192, 300, 4, 2


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    prob_TE = random_probs(T, E, seed=1)
    prob_TE[:, 2] = 0.0  # an expert without rows
    plan = route_top_k(prob_TE.cuda(), K).plan
    x_TD, w_gate_up, w_down = normal(T, D), normal(E, 2 * N, D), normal(E, D, N)
    h_R2N, a_RN, score_R = normal(plan.R, 2 * N), normal(plan.R, N), torch.rand(plan.R, generator=generator).cuda()
    backend = CuteSm90Backend()
    backend._num_clusters[x_TD.device] = 2
    ops = {
        "up": lambda: backend.up(x_TD, w_gate_up, plan)[1],
        "up_inference": lambda: backend.up_inference(x_TD, w_gate_up, plan),
        "down": lambda: backend.rows_matmul(a_RN, w_down.transpose(1, 2), plan),
        "dx": lambda: backend.rows_matmul(h_R2N, w_gate_up, plan),
        "down_backward": lambda: backend.down_backward(x_TD, h_R2N, w_down, score_R, plan).dh_R2N,
        "dw_down": lambda: backend.weight_grad(x_TD, a_RN, plan, gathered=GatheredSide.left),
        "dw_gate_up": lambda: backend.weight_grad(h_R2N, x_TD, plan, gathered=GatheredSide.right),
    }
    for name in sys.argv[1:] or ops:
        print(name, float(ops[name]().cpu().float().norm()), flush=True)


if __name__ == "__main__":
    main()
