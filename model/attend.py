"""Attention over heads that are ready for it: the one function behind which its kernels stand, and the choice of them.

Projections, norms and rotation are model/attention.py; documents and their masks are model/documents.py.
"""

import logging
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.compiled import compiled
from model.config import ModelConfig
from model.documents import DocumentMask
from model.flash_attention_4 import flash_attention_4, why_not_flash_attention_4
from moe_kernels import KernelUnavailable

log = logging.getLogger(__name__)


class AttentionKernel(Enum):
    """What computes attention in training; behind a key-value cache it is always ``sdpa``."""

    auto = "auto"  # a question to choose_attention: flex where documents are masked on a CUDA device, else sdpa
    sdpa = "sdpa"  # torch's scaled_dot_product_attention, cuDNN's kernel first; a document mask is B·S·S numbers
    flex = "flex"  # torch's FlexAttention, which skips keys of other documents in blocks; for document masks alone
    flash_attn_4 = "flash_attn_4"  # the package flash-attn-4, if it is installed; without document masks


# On an H200 (torch 2.11, causal, 4 × 4096 tokens, 16 heads of 128, bf16) cuDNN's forward and backward ran at 528 and
# 449 TFLOP/s, flash's at 305 and 278. Torch passes over what cannot run a problem, as cuDNN in fp32.
_SDPA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(
    query_BHSA: Tensor,
    key_BGSA: Tensor,
    value_BGSA: Tensor,
    *,
    mask: DocumentMask | None,
    kernel: AttentionKernel = AttentionKernel.sdpa,
) -> Tensor:
    """Return for each query the mean of the values that it sees, weighted by softmax(query · key / √A); (B, H, S, A).

    The queries belong to the last S of the keys' positions; each sees its own position and those before it, with a
    ``mask`` only what that allows of them. A mask needs as many keys as queries, and says itself what reads it.
    """
    num_new, num_past = query_BHSA.shape[2], key_BGSA.shape[2] - query_BHSA.shape[2]
    grouped = query_BHSA.shape[1] != key_BGSA.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled it makes all S·S scores. A block that is compiled takes it in; torch compiles no backward for CPUs.
        is_compiled = query_BHSA.is_cuda and not torch.compiler.is_compiling()
        flex: Any = compiled(flex_attention) if is_compiled else flex_attention
        return flex(query_BHSA, key_BGSA, value_BGSA, block_mask=mask, enable_gqa=grouped)
    if mask is None and num_past == 0 and kernel is AttentionKernel.flash_attn_4:
        return flash_attention_4(query_BHSA, key_BGSA, value_BGSA)
    if mask is None and num_past == 0:
        with sdpa_kernel(_SDPA_KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(query_BHSA, key_BGSA, value_BGSA, is_causal=True, enable_gqa=grouped)
    # In torch's own order, where cuDNN is not the first: it plans anew for every length of a cache.
    sees = _mask_after(num_past, num_new, query_BHSA.device) if mask is None else mask
    return F.scaled_dot_product_attention(query_BHSA, key_BGSA, value_BGSA, attn_mask=sees, enable_gqa=grouped)


def choose_attention(
    name: AttentionKernel, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, mask_documents: bool
) -> AttentionKernel:
    """Return the kernel that ``name`` allows for training on ``device`` in ``dtype``, never ``auto``, and log it.

    Raises: KernelUnavailable if the kernel that was named cannot run, saying why.
    """
    head_width = config.attention.head_width
    kernel, reason = name, None
    if name in {AttentionKernel.auto, AttentionKernel.flex}:
        reason = _why_not_flex(head_width, device=device, mask_documents=mask_documents)
    elif name is AttentionKernel.flash_attn_4:
        reason = why_not_flash_attention_4(head_width, device=device, dtype=dtype, mask_documents=mask_documents)
    if name is AttentionKernel.auto:
        kernel, reason = AttentionKernel.flex if reason is None else AttentionKernel.sdpa, None
    if reason is not None:
        raise KernelUnavailable(
            f"kernels.attention={name.value}: {reason}. Use kernels.attention=auto, or sdpa for any device"
        )
    of_sdpa = f" by {_kernel_of_sdpa(config, device, dtype)}" if kernel is AttentionKernel.sdpa else ""
    log.info("attention: %s%s (kernels.attention=%s)", kernel.value, of_sdpa, name.value)
    return kernel


def _why_not_flex(head_width: int, *, device: torch.device, mask_documents: bool) -> str | None:
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device.type}, it needs a CUDA device"
    if not mask_documents:
        return "FlexAttention is for documents alone, and data.mask_documents=false"
    if head_width < 16:
        return f"FlexAttention needs heads of 16 at least, and model.attention.head_width={head_width}"
    return None


def _kernel_of_sdpa(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel that scaled_dot_product_attention takes for rows without documents."""
    if device.type != "cuda":
        return f"torch on {device.type}"
    attention = config.attention
    query, key = (
        torch.empty(1, heads, 128, attention.head_width, dtype=dtype, device=device, requires_grad=True)
        for heads in (attention.num_heads, attention.num_kv_heads)
    )
    grouped = attention.num_heads != attention.num_kv_heads
    with sdpa_kernel(_SDPA_KERNELS, set_priority=True):
        choice = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=grouped)
    return SDPBackend(choice).name


def _mask_after(num_past: int, num_new: int, device: torch.device) -> Tensor | None:
    """Return which keys each query sees when ``num_past`` positions came before; None if it is all of them."""
    if num_new == 1:
        return None
    sees = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=device)
    # is_causal aligns the mask's corner with the first key, which is wrong behind a cache.
    return sees.tril(diagonal=num_past)
