"""The part of a checkpoint that is not tensors: where a run stands. Tensors, RNG and files are in store.py."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Where a run stands after ``step`` optimiser steps; enough to find the next batch and the same wandb run."""

    step: int
    tokens: int  # trained on so far, over all ranks
    samples: int  # sequences trained on so far, over all ranks: the position in the order of the data
    wandb_id: str | None
    # Top-K pairs of the last step by layer and expert, over all ranks: what a global balance loss compares the next
    # step with. None before the first step and in folders that hold weights only.
    top_k_counts: list[list[int]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """Build the state from what ``to_json`` returned.

        Raises: ValueError when a field is missing, unknown or of another type.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"a train state has the fields {sorted(names)}, but this one has {sorted(values)}")
        for name in ("step", "tokens", "samples"):
            if type(values[name]) is not int or values[name] < 0:
                raise ValueError(f"{name}={values[name]!r} in a train state must be a whole number from 0")
        if not isinstance(values["wandb_id"], str | None):
            raise ValueError(f"wandb_id={values['wandb_id']!r} in a train state must be text or null")
        counts = values["top_k_counts"]
        if counts is not None and not all(type(count) is int for layer in counts for count in layer):
            raise ValueError("top_k_counts in a train state must be whole numbers by layer and expert, or null")
        return cls(**values)
