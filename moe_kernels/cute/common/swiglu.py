"""SwiGLU and its backward for one gate and one up value, in fp32 with one hardware tanh each.

The twin in torch is moe_kernels/swiglu.py.
"""
# mypy: disable-error-code="import-not-found"

from typing import NamedTuple

from cutlass import Float32, cute


class SwiGLUPointGrads(NamedTuple):
    """What the backward needs of one gate and one up value; a is SwiGLU's own value."""

    dgate: Float32
    dup: Float32
    a: Float32


@cute.jit
def swiglu_point(gate: Float32, up: Float32) -> Float32:
    """Return silu(gate)·up. silu(g) = h·tanh(h) + h with h = g/2; tanh.approx errs by 2^-11 at most, relatively."""
    half = gate * Float32(0.5)
    return (half * cute.math.tanh(half, fastmath=True) + half) * up


@cute.jit
def swiglu_backward_point(da: Float32, gate: Float32, up: Float32) -> SwiGLUPointGrads:
    """Return the gradients of silu(gate)·up, where ``da`` is the gradient of its value."""
    half = gate * Float32(0.5)
    tanh = cute.math.tanh(half, fastmath=True)
    silu = half * tanh + half
    sigmoid = tanh * Float32(0.5) + Float32(0.5)
    return SwiGLUPointGrads(dgate=da * up * (sigmoid + silu - silu * sigmoid), dup=da * silu, a=silu * up)
