"""How close each op of our kernels comes to its roof: the least time it could take, at rates measured beside it."""

import torch
from torch import Tensor

from benchmarks.shapes import MoEShape, work_of
from benchmarks.timing import in_turns, time_ms
from moe_kernels import RoutingPlan
from moe_kernels.dispatch import Backend
from moe_kernels.side import GatheredSide

ROUNDS = 3


def measure_ops(
    backend: Backend,
    shape: MoEShape,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: RoutingPlan,
    used: int,
    ceilings: dict[str, float],
) -> dict[str, dict]:
    """Return each op's milliseconds, TFLOP/s, and the fraction of its roof.

    ``inputs`` are x_TD, w_gate_up, w_down and dout_TD; ``used`` is the plan's number of rows in use.
    """
    R = plan.R
    x, w_gate_up, w_down, dout = inputs
    h_R2N, a_RN, y_RD = (torch.randn(R, w, device="cuda").bfloat16() for w in (2 * shape.N, shape.N, shape.D))
    score_R = torch.rand(R, device="cuda")
    steps = {
        "up": lambda: backend.up(x, w_gate_up, plan),
        "down": lambda: backend.rows_matmul(a_RN, w_down.transpose(1, 2), plan),
        "combine": lambda: backend.combine(y_RD, score_R, plan),
        "down_backward": lambda: backend.down_backward(dout, h_R2N, w_down, score_R, plan),
        "dw_down": lambda: backend.weight_grad(dout, a_RN, plan, gathered=GatheredSide.left),
        "dw_gate_up": lambda: backend.weight_grad(h_R2N, x, plan, gathered=GatheredSide.right),
        "dx": lambda: backend.rows_matmul(h_R2N, w_gate_up, plan),
        "sum": lambda: backend.combine(y_RD, None, plan),
    }
    results = {}
    times = in_turns(steps, ROUNDS)
    for name, work in work_of(shape, used).items():
        ms = times[name]
        roof_ms = 1e3 * max(work.flops / ceilings["matmul_flops"], work.bytes / ceilings["copy_bytes"])
        results[name] = {
            "ms": ms,
            "tflops": work.flops / ms / 1e9,
            "tb_per_s": work.bytes / ms / 1e9,
            "roof_fraction": roof_ms / ms,
        }
    return results


def measure_ceilings() -> dict[str, float]:
    """Return the rates of an 8192³ bf16 matrix product (FLOP/s) and of a 4 GB copy (bytes read and written per s)."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    matmul_ms = time_ms(lambda: left @ right, 60, lead=60)  # as warm as in_turns makes what is compared with it
    copy_ms = time_ms(lambda: target.copy_(source), 20, lead=20)
    return {"matmul_flops": 2 * 8192**3 / matmul_ms * 1e3, "copy_bytes": 2 * source.numel() * 2 / copy_ms * 1e3}
