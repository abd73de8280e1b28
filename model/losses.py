"""The losses, as pure functions: next-token cross-entropy, load balancing, and the router's z-loss.

Weighting and summing them is training/step.py. A load-balancing loss of 1.0 means balanced, E/K collapsed onto K
experts; how others scale theirs is ``BalanceConvention``.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.compiled import compiled
from model.wide_product import wide_product

IGNORED_LABEL = -100
CHUNK_TOKENS = 4096  # bf16 logits of one chunk at V = 50,304: 393 MiB


def chunked_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Return the sum of the cross-entropies, in nats, of the labels that are not -100: an fp32 scalar.

    Logits exist for ``chunk_tokens`` tokens at a time, in the inputs' dtype, as transformers makes them; softmax and
    sum are fp32 (fp64 if the inputs are), and the logits' gradient takes their place. Gradients are computed beside the
    loss and kept until asked for: (T, D) in the inputs' dtype, and (V, D) in fp32 so that chunks add up without being
    rounded to bf16 in between. T is at least 1.
    Source: computing the gradients with the loss is Liger-Kernel's idea, arXiv 2410.10989.
    """
    if not torch.is_grad_enabled():
        # Inside the Function this can't be asked: there gradients are always off, and it would compute them for nobody.
        x_TD, weight_VD = x_TD.detach(), weight_VD.detach()
    return _ChunkedCrossEntropy.apply(x_TD, weight_VD, label_T, chunk_tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, chunk_tokens: int) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if needs_x or needs_weight:
            cross_entropy = cross_entropy_with_gradient_
        else:
            cross_entropy = compiled(_cross_entropy) if x_TD.is_cuda else _cross_entropy
        ce_sum = torch.zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32), device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if needs_x else None
        dweight_VD: Tensor | None = None
        for start in range(0, x_TD.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            x_CD = x_TD[chunk]
            logits_CV = x_CD @ weight_VD.T
            # Not in place: torch 2.11, compiling this Function, then loses the gradient of what is returned.
            ce_sum = ce_sum + cross_entropy(logits_CV, label_T[chunk])
            dlogits_CV = logits_CV  # overwritten, where a gradient is needed
            if dx_TD is not None:
                dx_TD[chunk] = dlogits_CV @ weight_VD
            if needs_weight:
                of_chunk_VD = wide_product(dlogits_CV.T, x_CD)
                dweight_VD = of_chunk_VD if dweight_VD is None else dweight_VD.add_(of_chunk_VD)
                del of_chunk_VD
            del logits_CV, dlogits_CV  # or they would still be there when the next chunk's come
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return ce_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dce_sum,) = grads
        dx_TD, scaled_VD = ctx.saved_tensors
        if scaled_VD is not None:
            # Written in the weight's dtype at once: in fp32 it would be another of the step's largest tensors.
            scaled_VD = torch.mul(scaled_VD, dce_sum, out=torch.empty_like(scaled_VD, dtype=ctx.weight_dtype))
        return None if dx_TD is None else dx_TD * dce_sum, scaled_VD, None, None


def cross_entropy_with_gradient_(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    """Return the summed cross-entropy of the labels that are not -100; overwrite the logits with its gradient."""
    # Compiled, the logits are read in 16 bits and overwritten in 16 bits, without ever being fp32 in memory.
    softmax_ = compiled(_softmax_) if logits_CV.is_cuda else _softmax_
    ce_sum, target_C1, dtarget_C1 = softmax_(logits_CV, label_C)
    # Inside the compiled function this would pass through another tensor of the logits' size.
    logits_CV.scatter_(1, target_C1, dtarget_C1)
    return ce_sum


def _softmax_(logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross-entropy, where its labels are and their gradient; overwrite with the others' gradient."""
    log_prob_CV, log_prob_C1, target_C1, is_valid_C1 = _log_probabilities(logits_CV, label_C)
    logits_CV.copy_(log_prob_CV.exp_().mul_(is_valid_C1))
    dtarget_C1 = (log_prob_C1.expm1() * is_valid_C1).to(logits_CV.dtype)
    return -(log_prob_C1 * is_valid_C1).sum(), target_C1, dtarget_C1


def _cross_entropy(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    _, log_prob_C1, _, is_valid_C1 = _log_probabilities(logits_CV, label_C)
    return -(log_prob_C1 * is_valid_C1).sum()


def _log_probabilities(logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log p of all and of the labels, fp32 or wider; the labels, 0 for -100; and whether they were others."""
    is_valid_C1 = label_C[:, None] != IGNORED_LABEL
    target_C1 = label_C[:, None].where(is_valid_C1, 0)
    log_prob_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).log_softmax(dim=-1)
    return log_prob_CV, log_prob_CV.gather(1, target_C1), target_C1, is_valid_C1


def load_fraction(top_k_count_E: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return every expert's share of the top-K pairs over the last dimension (…, E); the shares sum to 1."""
    return top_k_count_E.to(dtype) / top_k_count_E.sum(dim=-1, keepdim=True)


def balance_loss(load_fraction_E: Tensor, prob_mean_E: Tensor) -> Tensor:
    """Return E · Σ_e f_e · p_e over the last dimension: shares of pairs against mean router probabilities.

    1 if either is uniform, E/K if both lie on the same K experts. Gradients flow through ``prob_mean_E`` alone.
    Source: Switch Transformers, arXiv 2101.03961, equations 4 to 6, with f_e divided by K.
    """
    return load_fraction_E.shape[-1] * (load_fraction_E.detach() * prob_mean_E).sum(dim=-1)


def load_balance_loss(top_k_count_E: Tensor, prob_sum_E: Tensor, *, K: int) -> Tensor:
    """Return the load-balancing loss of each leading index of (…, E) from counts and probabilities of the same tokens.

    ``top_k_count_E`` are counts before rounding, T·K in all; ``prob_sum_E`` are sums of probabilities, T in all.
    """
    num_tokens = top_k_count_E.sum(dim=-1, keepdim=True) / K
    return balance_loss(load_fraction(top_k_count_E, dtype=prob_sum_E.dtype), prob_sum_E / num_tokens)


def micro_batch_load_balance_loss(top_k_count_LBE: Tensor, prob_sum_LBE: Tensor, *, K: int) -> Tensor:
    """Return the load-balancing loss over all tokens of a micro-batch, as the mean over layers.

    Layers are not pooled: pooled, layers that collapse onto different experts look balanced.
    """
    return load_balance_loss(top_k_count_LBE.sum(dim=1), prob_sum_LBE.sum(dim=1), K=K).mean()


def sequence_load_balance_loss(top_k_count_LBE: Tensor, prob_sum_LBE: Tensor, *, K: int) -> Tensor:
    """Return the load-balancing loss of every sequence by itself, as the mean over sequences and layers.

    Source: the complementary sequence-wise loss of DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    return load_balance_loss(top_k_count_LBE, prob_sum_LBE, K=K).mean()


def global_load_balance_loss(load_fraction_LE: Tensor, prob_sum_LBE: Tensor, *, num_tokens: int) -> Tensor:
    """Return the loss of a micro-batch against the load of a whole step, as the mean over layers.

    ``load_fraction_LE`` is ``load_fraction`` of the counts over all ranks and micro-batches of the step before;
    ``num_tokens`` are those of this micro-batch. Being linear in the probabilities, the losses of a step's
    micro-batches, weighted by their tokens, add up to that of the step however it is divided.
    Source: Qiu et al., arXiv 2501.11873 (there with the running step's counts).
    """
    return balance_loss(load_fraction_LE, prob_sum_LBE.sum(dim=1) / num_tokens).mean()


def router_z_loss(z_sum_L: Tensor, num_tokens: int) -> Tensor:
    """Return the mean over tokens and layers of logsumexp(logits)², from its sums over tokens.

    Source: ST-MoE, arXiv 2202.08906, equation 5.
    """
    return (z_sum_L / num_tokens).mean()


class BalanceConvention(Enum):
    """Whose coefficient of the load-balancing loss a number is; see ``coefficient_factor``."""

    hugging_face = "hugging_face"  # transformers: one loss over all layers pooled, K when balanced
    olmoe = "olmoe"  # OLMoE's training (megablocks): mean over layers, 1 when balanced
    megatron = "megatron"  # Megatron-Core: every layer adds its own, 1 each when balanced


def coefficient_factor(convention: BalanceConvention, *, K: int, num_moe_layers: int) -> float:
    """Return what to multiply a coefficient of ``convention`` by to get ours; divide ours by it for the way back.

    Exact for OLMoE and Megatron. For Hugging Face exact where layers have the same loads, as its loss pools layers.
    The same factor for Megatron holds for the z-loss, which it also adds layer by layer.

    Sources: transformers 5, models/olmoe/modeling_olmoe.py, load_balancing_loss_func; megablocks, layers/moe.py,
    batched_load_balancing_loss (the function used, says allenai/OLMoE issue 40); Megatron-LM,
    core/transformer/moe/moe_utils.py, switch_load_balancing_loss_func.
    """
    if convention is BalanceConvention.hugging_face:
        return float(K)
    if convention is BalanceConvention.megatron:
        return float(num_moe_layers)
    return 1.0
