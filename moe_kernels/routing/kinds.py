"""The names of the routings and of the rounding rules. The rules themselves are in token_rounding.py."""

from enum import Enum


class RoutingKind(Enum):
    """How the (token, expert) pairs to compute are chosen."""

    top_k = "top_k"  # each token's K most probable experts
    token_rounding = "token_rounding"  # top-K, then every expert's count moved to a multiple of the tile
    expert_choice = "expert_choice"  # each expert's T·K/E most probable tokens: sees the future, for research only


class Rounding(Enum):
    """How an expert's count f becomes a multiple of the tile, between lo = floor and hi = ceil to the tile."""

    nearest = "nearest"  # hi if hi - f < f - lo, else lo (half a tile goes down)
    stochastic = "stochastic"  # hi with probability (f - lo) / tile, seeded
    nearest_score = "nearest_score"  # by summed scores s of the kept pairs: hi if s_hi - s_f < s_f - s_lo
    balanced = "balanced"  # experts in order, carrying the signed total deviation; the side that keeps it smallest
    up = "up"  # keep every top-K pair, add tokens
    down = "down"  # add none, drop the least probable
