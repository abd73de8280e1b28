"""Causal attention by the package flash-attn-4 (CuTe kernels for Hopper and Blackwell), as one opaque operator.

The package's own function cannot be traced by torch.compile. Whether it can run is asked once, by attend.py; only then
is it imported.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attention_4(query_BHSA: Tensor, key_BGSA: Tensor, value_BGSA: Tensor) -> Tensor:
    """Return causal attention (B, H, S, A) over as many keys as queries, in bf16 or fp16 on a CUDA device.

    Source: flash-attn-4 4.0.0b36, flash_attn/cute/interface.py, FlashAttnFunc. Its backward adds in an order that
    differs between runs.
    """
    out_BSHA, _ = _forward(query_BHSA.transpose(1, 2), key_BGSA.transpose(1, 2), value_BGSA.transpose(1, 2))
    return out_BSHA.transpose(1, 2)


def why_not_on_any_device(head_width: int, *, dtype: torch.dtype, mask_documents: bool) -> str | None:
    """Return why it cannot be used whatever the device, in words and with what is wrong, or None if it may."""
    if mask_documents:
        return "flash-attn-4 is used without document masks, and data.mask_documents=true"
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"flash-attn-4 computes in 16 bits, and this model in {dtype}"
    if head_width % 8 != 0 or head_width > 128:
        return f"flash-attn-4 is used for heads of 8 to 128 by eights, and model.attention.head_width={head_width}"
    return None


def why_not_flash_attention_4(
    head_width: int, *, device: torch.device, dtype: torch.dtype, mask_documents: bool
) -> str | None:
    """Return why it cannot be used, in words and with what is wrong, or None if it can."""
    reason = why_not_on_any_device(head_width, dtype=dtype, mask_documents=mask_documents)
    if reason is not None:
        return reason
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in {9, 10}:
        return f"flash-attn-4 needs a CUDA device of compute capability 9 or 10, this one is {device}"
    try:
        _package()
    except ImportError as error:
        return f"flash-attn-4 cannot be imported ({error}): pip install 'gristmill[flash]'"
    return None


def _package() -> ModuleType:
    return importlib.import_module("flash_attn.cute.interface")


@torch.library.custom_op("gristmill::flash_attention_4", mutates_args=())
def _forward(query_BSHA: Tensor, key_BSGA: Tensor, value_BSGA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention and, for the backward, the logarithm of each query's sum, fp32 (B, H, S)."""
    out_BSHA, logsumexp_BHS, *_ = _package()._flash_attn_fwd(
        query_BSHA, key_BSGA, value_BSGA, causal=True, return_lse=True
    )
    return out_BSHA, logsumexp_BHS


@_forward.register_fake
def _(query_BSHA: Tensor, key_BSGA: Tensor, value_BSGA: Tensor) -> tuple[Tensor, Tensor]:
    B, S, H, _ = query_BSHA.shape
    return query_BSHA.new_empty(query_BSHA.shape), query_BSHA.new_empty((B, H, S), dtype=torch.float32)


@torch.library.custom_op("gristmill::flash_attention_4_bwd", mutates_args=())
def _backward(
    dout_BSHA: Tensor, query_BSHA: Tensor, key_BSGA: Tensor, value_BSGA: Tensor, out_BSHA: Tensor, logsumexp_BHS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dquery_BSHA, dkey_BSGA, dvalue_BSGA = _empty_grads(query_BSHA, key_BSGA, value_BSGA)
    _package()._flash_attn_bwd(
        query_BSHA,
        key_BSGA,
        value_BSGA,
        out_BSHA,
        dout_BSHA,
        logsumexp_BHS,
        causal=True,
        dq=dquery_BSHA,
        dk=dkey_BSGA,
        dv=dvalue_BSGA,
    )
    return dquery_BSHA, dkey_BSGA, dvalue_BSGA


@_backward.register_fake
def _(
    dout_BSHA: Tensor, query_BSHA: Tensor, key_BSGA: Tensor, value_BSGA: Tensor, out_BSHA: Tensor, logsumexp_BHS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_grads(query_BSHA, key_BSGA, value_BSGA)


def _empty_grads(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dquery_BSHA, dkey_BSGA, dvalue_BSGA = (tensor.new_empty(tensor.shape) for tensor in inputs)
    return dquery_BSHA, dkey_BSGA, dvalue_BSGA


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _to_inputs(ctx: Any, dout_BSHA: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout_BSHA is None:
        return None, None, None
    return _backward(dout_BSHA, *ctx.saved_tensors)


_forward.register_autograd(_to_inputs, setup_context=_save_for_backward)
