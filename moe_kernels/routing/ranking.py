"""The one order in which pairs compete: by fp32 value, ties to the lower index. Exact on every device.

``torch.topk`` and ``torch.sort`` leave ties open or cost a stable sort; a value and its index packed into one integer
compare without ties at all.
"""

import torch
from torch import Tensor

INT64_MAX = 2**63 - 1  # key ^ INT64_MAX reverses the order of keys


def rank_keys(value: Tensor) -> Tensor:
    """Return int64 keys >= 0, distinct along the last dim: higher for higher values and, in ties, for lower indices.

    Values are compared in fp32; -0 equals 0, and NaN ranks by its bits, so the order is total whatever comes. The last
    dim must be shorter than 2³¹.
    """
    bits = (value.float() + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    # The bits of negative floats grow with magnitude: flipping all but the sign restores the order of the numbers.
    ordered = ((bits >> 31) & 0x7FFFFFFF).bitwise_xor_(bits)
    index = torch.arange(value.shape[-1], device=value.device)
    # Value in the high bits, index in the low 31; in place, because this is the largest tensor of routing.
    return ordered.long().mul_(2**31).add_(2**62 + 2**31 - 1 - index)
