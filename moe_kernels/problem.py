"""MoEProblem: the shape of one routed expert layer, as a backend judges it. Which backend runs it: dispatch.py."""

from dataclasses import dataclass

import torch

from moe_kernels.routing.kinds import RoutingKind


@dataclass(frozen=True)
class MoEProblem:
    """What is known of a layer when the model is built; everything else is a run-time value.

    ``arch`` is ``"cpu"``, or ``"sm90"`` and the like for CUDA devices (``dispatch.arch_of``).
    """

    T: int  # tokens in a micro-batch
    D: int  # model width
    N: int  # expert width
    E: int  # experts
    K: int  # experts per token
    tile_m: int  # token rounding makes every expert's count a multiple of it; 1 for other routings
    routing: RoutingKind
    dtype: torch.dtype  # of activations and expert weights
    arch: str
