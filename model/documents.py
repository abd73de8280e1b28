"""Which tokens of a packed row belong together, and the mask that keeps attention among them.

How rows are packed is data/packing.py; the attention that reads the mask is model/attend.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents that the rows of a batch are packed from, token by token."""

    number_BS: Tensor  # integers, equal for tokens of one document and different for others of the row
    position_BS: Tensor  # integers, the token's place in its document, from 0; in a row's first, from the row's start


class DocumentMask(NamedTuple):
    """Which keys each query sees, in the form that attention reads. Made once in a forward, for all layers."""

    bias_B1SS: Tensor  # added to the scores: 0 for the token itself and those before it in its document, else -inf


def document_mask(documents: Documents, *, dtype: torch.dtype) -> DocumentMask:
    """Return the mask that is causal and keeps attention inside documents, on their device.

    ``dtype`` is that of the queries: B · S · S numbers of it are kept until the backward.
    """
    number_BS = documents.number_BS
    S = number_BS.shape[1]
    is_earlier_SS = torch.ones(S, S, dtype=torch.bool, device=number_BS.device).tril()
    sees_BSS = (number_BS[:, :, None] == number_BS[:, None, :]) & is_earlier_SS
    # Not boolean: of such a mask scaled_dot_product_attention makes this one in every layer, and keeps them all.
    bias_BSS = torch.zeros(sees_BSS.shape, dtype=dtype, device=number_BS.device).masked_fill(~sees_BSS, float("-inf"))
    return DocumentMask(bias_BSS[:, None])
