"""Attention over heads that are ready for it: the one function behind which kernels for it stand.

Projections, norms and rotation are model/attention.py; documents and their mask are model/documents.py.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.documents import DocumentMask


def attend(query_BHSA: Tensor, key_BGSA: Tensor, value_BGSA: Tensor, *, mask: DocumentMask | None) -> Tensor:
    """Return for each query the mean of the values that it sees, weighted by softmax(query · key / √A); (B, H, S, A).

    The queries belong to the last S of the keys' positions; each sees its own position and those before it, with a
    ``mask`` only what that allows of them. A mask needs as many keys as queries.
    """
    num_new, num_past = query_BHSA.shape[2], key_BGSA.shape[2] - query_BHSA.shape[2]
    return F.scaled_dot_product_attention(
        query_BHSA,
        key_BGSA,
        value_BGSA,
        attn_mask=_mask_after(num_past, num_new, query_BHSA.device) if mask is None else mask.bias_B1SS,
        is_causal=mask is None and num_past == 0,
        enable_gqa=query_BHSA.shape[1] != key_BGSA.shape[1],
    )


def _mask_after(num_past: int, num_new: int, device: torch.device) -> Tensor | None:
    """Return which keys each query sees when ``num_past`` positions came before; None where no mask is needed."""
    if num_past == 0 or num_new == 1:
        return None  # is_causal says it, or a single last position sees everything
    sees = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=device)
    # is_causal aligns the mask's corner with the first key, which is wrong behind a cache.
    return sees.tril(diagonal=num_past)
