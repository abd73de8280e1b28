"""GatheredSide: which operand of a weight gradient is read through the plan."""

from enum import Enum


class GatheredSide(Enum):
    """The side of an outer product whose rows are tokens (T, ·); the other side's are expert rows (R, ·)."""

    left = "left"
    right = "right"
