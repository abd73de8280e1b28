"""SwiGLU on packed [gate | up] rows and its backward, in fp32 or wider. Shared by the backends written in torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SwiGLUGrads(NamedTuple):
    """What the backward of the expert MLP needs of one row's activation."""

    dh_R2N: Tensor
    scaled_a_RN: Tensor  # score · SwiGLU(h)
    dscore_R: Tensor


class DownGrads(NamedTuple):
    """What a backend's ``down_backward`` returns."""

    dh_R2N: Tensor
    scaled_a_RN: Tensor  # score · SwiGLU(h)
    dscore_TE: Tensor  # zero for pairs that are not in the plan


def swiglu(h_R2N: Tensor) -> Tensor:
    """Return silu(gate)·up (R, N) in the dtype of ``h_R2N``, computed in fp32 or wider."""
    gate_RN, up_RN = _wide(h_R2N).chunk(2, dim=-1)
    return (F.silu(gate_RN) * up_RN).to(h_R2N.dtype)


def swiglu_backward(da_RN: Tensor, h_R2N: Tensor, score_R: Tensor) -> SwiGLUGrads:
    """Return the gradients of score·SwiGLU(h), where ``da_RN`` is the gradient with respect to score·a.

    The gradient of the score is ⟨da, a⟩: a dot of length N, with no need of the layer's output rows.
    Source: SonicMoE (arXiv 2512.14080), section 3.
    """
    da_RN, score_R1 = _wide(da_RN), score_R[:, None]
    gate_RN, up_RN = _wide(h_R2N).chunk(2, dim=-1)
    silu_RN = F.silu(gate_RN)
    a_RN = silu_RN * up_RN
    scaled_da_RN = score_R1 * da_RN
    dgate_RN = torch.ops.aten.silu_backward(scaled_da_RN * up_RN, gate_RN)
    dup_RN = scaled_da_RN * silu_RN
    return SwiGLUGrads(
        dh_R2N=torch.cat([dgate_RN, dup_RN], dim=-1).to(h_R2N.dtype),
        scaled_a_RN=(score_R1 * a_RN).to(h_R2N.dtype),
        dscore_R=(da_RN * a_RN).sum(-1),
    )


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in fp32, or as it is if wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
