"""Learning-rate schedules: pure functions of the step. What they scale is in optim.py.

Both rise linearly, so that step ``warmup_steps`` is the first at the peak, and end at ``final_fraction`` at step
``num_steps``, one past the last.
"""

import math


def cosine_factor(step: int, *, num_steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Return the factor on the peak rate for optimiser step ``step`` (from 0): after the rise, half a cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def wsd_factor(step: int, *, num_steps: int, warmup_steps: int, decay_steps: int, final_fraction: float) -> float:
    """Return the factor for optimiser step ``step`` (from 0): warm-up, stable, then linearly down over ``decay_steps``.

    Source: MiniCPM, arXiv 2404.06395, section 4; linear decay as in arXiv 2405.18392.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    remaining = num_steps - step
    if remaining >= decay_steps:
        return 1.0
    return final_fraction + (1 - final_fraction) * max(0, remaining) / decay_steps
