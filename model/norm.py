"""RMSNorm with the rounding of transformers, so that an exported model gives the numbers that we saw."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale vectors to a root mean square of 1, then by a learned weight per component.

    The mean and the division are done in fp32, the result is rounded to the input's dtype, and the weight multiplies
    that. ``F.rms_norm`` rounds once, after the weight, and differs in bf16.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension, in its own dtype.

        Source: transformers 5, models/olmoe/modeling_olmoe.py, OlmoeRMSNorm (the order of its roundings).
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)
