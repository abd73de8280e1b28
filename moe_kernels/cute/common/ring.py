"""Places in a ring of shared-memory stages, as plain integers that a loop carries."""
# mypy: disable-error-code="import-not-found"

import cutlass
from cutlass import Int32, cute


@cute.jit
def next_stage(stage: Int32, stages: cutlass.Constexpr) -> Int32:
    """Return the next place in a ring of ``stages``."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
    return stage


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Return the next place in a ring of ``stages`` and the parity with which to wait for it."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def skip(stage: Int32, phase: Int32, count: cutlass.Constexpr, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Return the place in a ring ``count`` stages on."""
    stage += count % stages
    phase ^= (count // stages) % 2
    if stage >= stages:
        stage -= stages
        phase ^= 1
    return stage, phase
