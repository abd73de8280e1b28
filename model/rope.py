"""Rotary position embedding: angles from positions, and the rotation of queries and keys by them.

The tables are a function of the positions and are computed in every forward pass, once for all layers: they are no
part of the model's state, so no cast, device move or ``to_empty`` can damage them.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTables(NamedTuple):
    """Cosines and sines of every position's angles in fp32; the two halves of the last dimension are equal.

    (S, A) where all rows have the same positions, (B, S, A) where each has its own.
    """

    cos_SA: Tensor
    sin_SA: Tensor


def rotary_tables(position_S: Tensor, *, head_width: int, theta: float) -> RotaryTables:
    """Return the fp32 tables for integer positions (S,), or (B, S) of each row, on their device.

    Component i turns by position · theta^(-2i / head_width).
    Source: transformers 5, models/olmoe/modeling_olmoe.py, OlmoeRotaryEmbedding (same order of fp32 operations).
    """
    exponent_A = torch.arange(0, head_width, 2, dtype=torch.float32, device=position_S.device) / head_width
    frequency_A = 1.0 / (theta**exponent_A)
    angle_SA = position_S[..., None].float() * frequency_A
    angle_SA = torch.cat((angle_SA, angle_SA), dim=-1)
    return RotaryTables(angle_SA.cos(), angle_SA.sin())


def rotate(x_BHSA: Tensor, tables: RotaryTables) -> Tensor:
    """Return queries or keys turned by their positions' angles, in their own dtype.

    Components i and i + A/2 form a pair. The tables are rounded to the dtype of ``x_BHSA`` first, as transformers does.
    """
    first, second = x_BHSA.chunk(2, dim=-1)
    turned_BHSA = torch.cat((-second, first), dim=-1)
    cos_1SA, sin_1SA = (table_SA.to(x_BHSA.dtype).unsqueeze(-3) for table_SA in tables)
    return x_BHSA * cos_1SA + turned_BHSA * sin_1SA
