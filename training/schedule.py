"""Learning-rate schedules: pure functions of the step. What they scale is in optim.py."""

import math


def cosine_factor(step: int, *, num_steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Return the factor on the peak learning rate for optimiser step ``step`` (from 0).

    Rises linearly so that step ``warmup_steps`` is the first at the peak, then falls along half a cosine that would
    reach ``final_fraction`` at step ``num_steps``, one past the last.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
