"""One pass of AdamW over one tensor: 16 bytes read and 12 written for each value.

Needs triton, which CUDA builds of torch bring.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from math import log

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # values of one program: with 256 threads, two loads of 16 bytes from each of four tensors in flight


def adamw_step(
    parameter: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update ``parameter`` and its moments ``mean`` and ``square`` in place, all contiguous fp32 of one size.

    ``count`` is the number of steps, this one included. The gradient is divided by ``scale`` first. Where ``found_inf``
    is not zero nothing is written. These three are scalars on the device, fp32.
    """
    size = parameter.numel()
    beta1, beta2 = betas
    _adamw[(triton.cdiv(size, _BLOCK),)](
        parameter,
        grad,
        mean,
        square,
        count,
        count if scale is None else scale,
        count if found_inf is None else found_inf,
        size,
        lr,
        lr * weight_decay,
        beta1,
        1.0 - beta1,
        log(beta1) if beta1 > 0.0 else -1e30,
        beta2,
        1.0 - beta2,
        log(beta2) if beta2 > 0.0 else -1e30,
        eps,
        has_scale=scale is not None,
        may_skip=found_inf is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _adamw(
    parameter,
    grad,
    mean,
    square,
    count,
    scale,
    found_inf,
    size,
    lr,
    decay,
    beta1,
    rest1,
    log_beta1,
    beta2,
    rest2,
    log_beta2,
    eps,
    has_scale: tl.constexpr,
    may_skip: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skips = False
    if may_skip:
        skips = tl.load(found_inf) != 0.0
    if not skips:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        p = tl.load(parameter + at, mask=inside)
        g = tl.load(grad + at, mask=inside)
        m = tl.load(mean + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        if has_scale:
            g = g / tl.load(scale)
        # 1 - beta^n, in fp64: in fp32 the difference would keep four digits of the second beta's at the first steps.
        n = tl.load(count).to(tl.float64)
        correction1 = (1.0 - tl.exp(n * log_beta1)).to(tl.float32)
        correction2 = tl.sqrt((1.0 - tl.exp(n * log_beta2)).to(tl.float32))
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p -= decay * p
        p -= (lr / correction1) * m / (tl.sqrt(v) / correction2 + eps)
        tl.store(parameter + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
