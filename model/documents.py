"""Which tokens of a packed row belong together, and the masks that keep attention among them.

How rows are packed is data/packing.py; the attention that reads a mask is model/attend.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

# Which keys each query sees, in the form that a kernel reads; made once in a forward, for all layers. A tensor is added
# to the scores, a BlockMask is for FlexAttention.
DocumentMask = Tensor | BlockMask


class Documents(NamedTuple):
    """The documents that the rows of a batch are packed from, token by token."""

    number_BS: Tensor  # integers, equal for tokens of one document and different for others of the row
    position_BS: Tensor  # integers, the token's place in its document, from 0; in a row's first, from the row's start


def document_bias(documents: Documents, *, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, S, S), 0 for the token itself and those before it in its document, else -inf, on their device.

    ``dtype`` is that of the queries: B · S · S numbers of it are kept until the backward.
    """
    number_BS = documents.number_BS
    S = number_BS.shape[1]
    is_earlier_SS = torch.ones(S, S, dtype=torch.bool, device=number_BS.device).tril()
    sees_BSS = (number_BS[:, :, None] == number_BS[:, None, :]) & is_earlier_SS
    # Not boolean: of such a mask scaled_dot_product_attention makes this one in every layer, and keeps them all.
    bias_BSS = torch.zeros(sees_BSS.shape, dtype=dtype, device=number_BS.device).masked_fill(~sees_BSS, float("-inf"))
    return bias_BSS[:, None]


def document_blocks(documents: Documents) -> BlockMask:
    """Return the same mask as the blocks of 128 queries and 128 keys in which something is seen, on their device.

    B · S · S booleans exist while it is made, a number for each block afterwards.
    """
    number_BS = documents.number_BS
    B, S = number_BS.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (number_BS[row, query] == number_BS[row, key]) & (key <= query)

    return create_block_mask(sees, B, None, S, S, device=number_BS.device)
