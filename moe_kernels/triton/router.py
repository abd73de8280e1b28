"""From fp32 logits to weights, choice and sums in one launch, and one launch back to the gradient of the logits.

Every program takes tokens of one sequence and leaves its share of the sums; a second, small launch adds the shares in a
fixed order, so that a repeated step gives the same bits. Backward makes the probabilities anew from the logits: what is
saved is the logits and, where weights are normalised, the choice. Device code is router_kernels.py; the product that
makes the logits is model/router.py.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_kernels.operators import operator
from moe_kernels.triton.choice import block_of
from moe_kernels.triton.router_kernels import add_shares_kernel, backward_kernel, forward_kernel, split_kernel

_CHUNKS = 4  # chunks of tokens of one program: each program ends with sums over its tokens, which cost as much as one
_REGISTERS = 128  # of a thread: 16 warps on a multiprocessor hide more than the few values that do not fit cost
_SHARES = 64  # shares of sums that are added at a time
_EXPERTS = 32  # columns of sums in one program: one line of memory
_ALL_SHARES = 1024
_SPLIT_AT_A_TIME = 2048

RouterTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class RoutedTensors(NamedTuple):
    """What one micro-batch's logits become. Gradients reach score_TE, prob_sum_BE and z_sum."""

    score_TE: Tensor  # fp32, the weight of every pair
    top_k_mask_TE: Tensor  # bool
    prob_ET: Tensor  # fp32, what token rounding ranks by; empty unless transposed
    top_k_mask_ET: Tensor  # bool; empty unless transposed
    top_k_count_BE: Tensor  # int64
    prob_sum_BE: Tensor  # fp32, probabilities that sum to 1 for each token
    z_sum: Tensor  # fp32, summed logsumexp(logits)²
    entropy_sum: Tensor  # fp32, nats
    logit_max: Tensor  # fp32


def weigh_and_choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    K: int,
    num_sequences: int,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    transposed: bool,
) -> RoutedTensors:
    """Return weights, exact top-K choice and sums of fp32 logits.

    ``bias_E`` moves the choice alone. A weight is p · scale, over the token's top-K mass if ``normalize``; p is the
    softmax or, if ``sigmoid``, the sigmoid of the logits. ``transposed`` adds what token rounding reads.

    Raises: ValueError if the tokens do not divide into ``num_sequences``.
    """
    T = logits_TE.shape[0]
    if num_sequences < 1 or T % num_sequences:
        raise ValueError(f"{T} tokens do not divide into num_sequences={num_sequences}")
    outputs = torch.ops.gristmill.weigh_and_choose(
        logits_TE, bias_E, K, num_sequences, sigmoid, normalize, scale, transposed
    )
    routed = RoutedTensors(*outputs)
    # No gradient belongs to these, and a float output of an operator would otherwise claim one.
    return routed._replace(
        prob_ET=routed.prob_ET.detach(), entropy_sum=routed.entropy_sum.detach(), logit_max=routed.logit_max.detach()
    )


@operator("weigh_and_choose")
def _weigh_and_choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    K: int,
    num_sequences: int,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    transposed: bool,
) -> RouterTensors:
    logits_TE = logits_TE.contiguous()
    outputs = _empty(logits_TE, num_sequences, transposed)
    routed = RoutedTensors(*outputs)
    (T, E), device = logits_TE.shape, logits_TE.device
    if T == 0:
        for output in outputs:
            output.zero_()
        return outputs
    block = block_of(E)
    tokens, share_tokens = T // num_sequences, _CHUNKS * block.chunk
    num_shares = triton.cdiv(tokens, share_tokens)  # of one sequence
    all_shares = num_shares * num_sequences
    shares = (
        torch.empty(all_shares, E, dtype=torch.float32, device=device),
        torch.empty(all_shares, E, dtype=torch.int32, device=device),
        torch.empty(3, all_shares, dtype=torch.float32, device=device),
    )
    forward_kernel[(num_shares, num_sequences)](
        logits_TE,
        logits_TE if bias_E is None else bias_E.contiguous(),
        routed.score_TE,
        routed.top_k_mask_TE.view(torch.int8),
        routed.prob_ET,
        routed.top_k_mask_ET.view(torch.int8),
        *shares,
        T,
        tokens,
        share_tokens,
        E,
        K,
        scale,
        biased=bias_E is not None,
        sigmoid=sigmoid,
        normalize=normalize,
        transposed=transposed,
        WIDTH=block.width,
        CHUNK=block.chunk,
        num_warps=block.num_warps,
        maxnreg=_REGISTERS if E % 16 == 0 else None,  # lines of other lengths take more addresses than fit
    )
    add_shares_kernel[(triton.cdiv(E, _EXPERTS), num_sequences)](
        *shares,
        routed.prob_sum_BE,
        routed.top_k_count_BE,
        routed.z_sum,
        routed.entropy_sum,
        routed.logit_max,
        E,
        num_shares,
        all_shares,
        SHARES=_SHARES,
        EXPERTS=_EXPERTS,
        ALL_SHARES=_ALL_SHARES,
        num_warps=4,
    )
    return outputs


def _empty(logits_TE: Tensor, num_sequences: int, transposed: bool) -> RouterTensors:
    """Return the tensors of ``RoutedTensors``, uninitialised."""
    T, E = logits_TE.shape
    transposed_shape = (E, T) if transposed else (0, 0)
    return (
        logits_TE.new_empty((T, E), dtype=torch.float32),
        logits_TE.new_empty((T, E), dtype=torch.bool),
        logits_TE.new_empty(transposed_shape, dtype=torch.float32),
        logits_TE.new_empty(transposed_shape, dtype=torch.bool),
        logits_TE.new_empty((num_sequences, E), dtype=torch.int64),
        logits_TE.new_empty((num_sequences, E), dtype=torch.float32),
        logits_TE.new_empty((), dtype=torch.float32),
        logits_TE.new_empty((), dtype=torch.float32),
        logits_TE.new_empty((), dtype=torch.float32),
    )


@_weigh_and_choose.register_fake
def _(logits_TE, bias_E, K, num_sequences, *form) -> RouterTensors:
    return _empty(logits_TE, num_sequences, transposed=form[-1])


@operator("weigh_and_choose_bwd")
def _weigh_and_choose_bwd(
    logits_TE: Tensor,
    top_k_mask_TE: Tensor | None,
    dscore_TE: Tensor | None,
    dprob_sum_BE: Tensor | None,
    dz_sum: Tensor | None,
    num_sequences: int,
    sigmoid: bool,
    scale: float,
) -> Tensor:
    """Return dlogits_TE; the mask is given if weights are normalised, and a gradient that nothing asked for is None."""
    logits_TE = logits_TE.contiguous()
    dlogits_TE = torch.empty_like(logits_TE)
    T, E = logits_TE.shape
    if T == 0:
        return dlogits_TE
    block = block_of(E)
    tokens = T // num_sequences
    mask_TE = None if top_k_mask_TE is None else top_k_mask_TE.view(torch.int8)
    # An argument that the kernel does not read still needs an address.
    pulls = [logits_TE if given is None else given.contiguous() for given in (mask_TE, dscore_TE, dprob_sum_BE, dz_sum)]
    backward_kernel[(triton.cdiv(tokens, block.chunk), num_sequences)](
        logits_TE,
        *pulls,
        dlogits_TE,
        tokens,
        E,
        scale,
        sigmoid=sigmoid,
        normalize=top_k_mask_TE is not None,
        has_dscore=dscore_TE is not None,
        has_dprob=dprob_sum_BE is not None,
        has_dz=dz_sum is not None,
        WIDTH=block.width,
        CHUNK=block.chunk,
        num_warps=block.num_warps,
    )
    return dlogits_TE


@_weigh_and_choose_bwd.register_fake
def _(logits_TE, *_) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: RouterTensors) -> None:
    logits_TE, _, _, ctx.num_sequences, ctx.sigmoid, normalize, ctx.scale, _ = inputs
    ctx.save_for_backward(logits_TE, RoutedTensors(*output).top_k_mask_TE if normalize else None)
    ctx.set_materialize_grads(False)


def _to_logits(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    d = RoutedTensors(*grads)  # type: ignore[arg-type]
    dlogits_TE = None
    if ctx.needs_input_grad[0] and not all(grad is None for grad in (d.score_TE, d.prob_sum_BE, d.z_sum)):
        logits_TE, top_k_mask_TE = ctx.saved_tensors
        dlogits_TE = _weigh_and_choose_bwd(
            logits_TE, top_k_mask_TE, d.score_TE, d.prob_sum_BE, d.z_sum, ctx.num_sequences, ctx.sigmoid, ctx.scale
        )
    return dlogits_TE, *(None for _ in ctx.needs_input_grad[1:])


_weigh_and_choose.register_autograd(_to_logits, setup_context=_save_for_backward)


@operator("split_bf16")
def split_bf16(wide_TE: Tensor) -> Tensor:
    """Return bf16 (T, 2E): fp32 ``wide_TE`` rounded, and beside it what the rounding left, rounded in turn."""
    wide_TE = wide_TE.contiguous()
    T, E = wide_TE.shape
    both_T2E = wide_TE.new_empty((T, 2 * E), dtype=torch.bfloat16)
    if T > 0:
        num_blocks = triton.cdiv(T * E, _SPLIT_AT_A_TIME)
        split_kernel[(num_blocks,)](wide_TE, both_T2E, T * E, E, BLOCK=_SPLIT_AT_A_TIME, num_warps=4)
    return both_T2E


@split_bf16.register_fake
def _(wide_TE) -> Tensor:
    T, E = wide_TE.shape
    return wide_TE.new_empty((T, 2 * E), dtype=torch.bfloat16)
