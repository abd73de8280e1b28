"""Random bits as a function of (seed, counter): the same on every device and in every version of torch."""

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF


def random_bits(seed: int | Tensor | None, num: int, device: torch.device) -> Tensor:
    """Return ``num`` int64 values, uniform in [0, 2³²), one for each counter 0..num-1.

    ``seed`` is an int or a zero-dimensional integer tensor; all 64 bits count.

    Raises: ValueError if there is no seed or an int does not fit in 64 bits.
    """
    if not isinstance(seed, Tensor):
        seed = torch.full((), checked_seed(seed), dtype=torch.int64, device=device)
    seed = seed.to(device=device, dtype=torch.int64)
    state = _mix((seed + 0x9E3779B9) & _MASK_32)
    state = _mix(state ^ ((seed >> 32) & _MASK_32))
    counter = torch.arange(num, device=device)
    return _mix((state + counter * 0x9E3779B9) & _MASK_32)


def checked_seed(seed: int | None) -> int:
    """Return ``seed``, or raise ``ValueError`` if there is none or it does not fit in 64 bits."""
    if seed is None:
        raise ValueError("rounding=stochastic needs a seed: the same seed gives the same plan on any device")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed} does not fit in a signed 64-bit integer")
    return seed


def _mix(bits: Tensor) -> Tensor:
    """Return a bijective scramble of int64 values in [0, 2³²).

    Source: the two-round xor-shift-multiply hash "lowbias32" of Chris Wellons' hash prospector.
    """
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _MASK_32
    bits = bits ^ (bits >> 15)
    # The constant minus 2³²: equal modulo 2³², and the product stays inside int64, whose overflow is undefined.
    bits = (bits * (0x846CA68B - 2**32)) & _MASK_32
    return bits ^ (bits >> 16)
