"""Device code of router.py: logits of some tokens to everything that is made of them, and back.

A program sees all experts of its tokens, so that softmax, top-K and every sum over experts stay in registers.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

import triton
import triton.language as tl

from moe_kernels.triton.choice import store_transposed, top_k_of

_SMALLEST = tl.constexpr(1e-20)  # sigmoids can all underflow to 0


@triton.jit
def _probabilities(logits_TE, place_CW, is_token_C, is_expert_W, sigmoid: tl.constexpr):
    """Return (logits, softmax, logsumexp, largest logit, affinity, affinity mass) of a chunk.

    Rows past the tokens see logits of zero.
    """
    exists = is_token_C[:, None] & is_expert_W[None, :]
    logit_CW = tl.load(logits_TE + place_CW, mask=exists, other=0.0)
    masked_CW = tl.where(is_expert_W[None, :], logit_CW, float("-inf"))
    max_C = tl.max(masked_CW, axis=1)
    exp_CW = tl.exp(masked_CW - max_C[:, None])
    sum_C = tl.sum(exp_CW, axis=1)
    softmax_CW = exp_CW / sum_C[:, None]
    lse_C = max_C + tl.log(sum_C)
    affinity_CW = softmax_CW
    if sigmoid:
        affinity_CW = tl.where(is_expert_W[None, :], 1.0 / (1.0 + tl.exp(-logit_CW)), 0.0)
    return logit_CW, softmax_CW, lse_C, max_C, affinity_CW, tl.sum(affinity_CW, axis=1) + _SMALLEST


@triton.jit(do_not_specialize=["tokens", "share_tokens", "K", "scale"])
def forward_kernel(
    logits_TE,
    bias_E,
    score_TE,
    top_k_mask_TE,
    prob_ET,
    top_k_mask_ET,
    prob_share_PE,
    count_share_PE,
    share_3P,
    T,
    tokens,
    share_tokens,
    E,
    K,
    scale,
    biased: tl.constexpr,
    sigmoid: tl.constexpr,
    normalize: tl.constexpr,
    transposed: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write weights, choice and, for each program, its share of the sums over the tokens of one sequence."""
    sequence = tl.program_id(1)
    expert_W = tl.arange(0, WIDTH)
    is_expert_W = expert_W < E
    prob_sum_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    count_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.int32)
    z_C = tl.zeros((CHUNK,), dtype=tl.float32)
    nats_C = tl.zeros((CHUNK,), dtype=tl.float32)
    highest_C = tl.full((CHUNK,), float("-inf"), dtype=tl.float32)
    first_token = tl.program_id(0) * share_tokens
    for first in range(first_token, tl.minimum(first_token + share_tokens, tokens), CHUNK):
        in_sequence_C = first + tl.arange(0, CHUNK)
        is_token_C = in_sequence_C < tokens
        token_C = sequence * tokens + in_sequence_C
        exists = is_token_C[:, None] & is_expert_W[None, :]
        place_CW = token_C.to(tl.int64)[:, None] * E + expert_W[None, :]
        logit_CW, softmax_CW, lse_C, max_C, affinity_CW, mass_C = _probabilities(
            logits_TE, place_CW, is_token_C, is_expert_W, sigmoid
        )
        choice_CW = affinity_CW
        if biased:
            choice_CW += tl.load(bias_E + expert_W, mask=is_expert_W, other=0.0)[None, :]
        chosen_CW = top_k_of(choice_CW, expert_W, E, K, WIDTH) & exists
        score_CW = affinity_CW
        if normalize:
            chosen_mass_C = tl.sum(tl.where(chosen_CW, affinity_CW, 0.0), axis=1) + _SMALLEST
            score_CW = score_CW / chosen_mass_C[:, None]
        tl.store(score_TE + place_CW, score_CW * scale, mask=exists)
        tl.store(top_k_mask_TE + place_CW, chosen_CW.to(tl.int8), mask=exists)
        if transposed:
            store_transposed(prob_ET, top_k_mask_ET, affinity_CW, chosen_CW, token_C, expert_W, exists, T)
        if sigmoid:
            prob_CW = tl.where(exists, affinity_CW / mass_C[:, None], 0.0)
            log_CW = tl.log(tl.where(prob_CW == 0.0, 1.0, prob_CW))
            nats_C += tl.sum(-prob_CW * log_CW, axis=1)
        else:
            # -Σ p log p without a logarithm for every pair, and without a difference of large numbers.
            prob_CW = tl.where(exists, softmax_CW, 0.0)
            below_CW = tl.where(prob_CW == 0.0, 0.0, max_C[:, None] - logit_CW)
            nats_C += tl.where(is_token_C, lse_C - max_C + tl.sum(prob_CW * below_CW, axis=1), 0.0)
        prob_sum_CW += prob_CW
        count_CW += chosen_CW.to(tl.int32)
        z_C += tl.where(is_token_C, lse_C * lse_C, 0.0)
        highest_C = tl.maximum(highest_C, tl.where(is_token_C, max_C, float("-inf")))
    share = sequence * tl.num_programs(0) + tl.program_id(0)
    num_shares = tl.num_programs(0) * tl.num_programs(1)
    tl.store(prob_share_PE + share * E + expert_W, tl.sum(prob_sum_CW, axis=0), mask=is_expert_W)
    tl.store(count_share_PE + share * E + expert_W, tl.sum(count_CW, axis=0), mask=is_expert_W)
    tl.store(share_3P + share, tl.sum(z_C, axis=0))
    tl.store(share_3P + num_shares + share, tl.sum(nats_C, axis=0))
    tl.store(share_3P + 2 * num_shares + share, tl.max(highest_C, axis=0))


@triton.jit(do_not_specialize=["num_shares", "all_shares"])
def add_shares_kernel(
    prob_share_PE,
    count_share_PE,
    share_3P,
    prob_sum_BE,
    top_k_count_BE,
    z_sum,
    entropy_sum,
    logit_max,
    E,
    num_shares,
    all_shares,
    SHARES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL_SHARES: tl.constexpr,
):
    """Add one sequence's shares for some experts; the very first program adds the numbers of all sequences too."""
    sequence = tl.program_id(1)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    prob_SX = tl.zeros((SHARES, EXPERTS), dtype=tl.float32)
    count_SX = tl.zeros((SHARES, EXPERTS), dtype=tl.int32)
    for first in range(0, num_shares, SHARES):
        share = first + tl.arange(0, SHARES)
        exists = (share < num_shares)[:, None] & (expert < E)[None, :]
        place = (sequence * num_shares + share)[:, None] * E + expert[None, :]
        prob_SX += tl.load(prob_share_PE + place, mask=exists, other=0.0)
        count_SX += tl.load(count_share_PE + place, mask=exists, other=0)
    tl.store(prob_sum_BE + sequence * E + expert, tl.sum(prob_SX, axis=0), mask=expert < E)
    tl.store(top_k_count_BE + sequence * E + expert, tl.sum(count_SX, axis=0).to(tl.int64), mask=expert < E)
    if (tl.program_id(0) == 0) & (sequence == 0):
        z_S = tl.zeros((ALL_SHARES,), dtype=tl.float32)
        entropy_S = tl.zeros((ALL_SHARES,), dtype=tl.float32)
        highest_S = tl.full((ALL_SHARES,), float("-inf"), dtype=tl.float32)
        for first in range(0, all_shares, ALL_SHARES):
            share = first + tl.arange(0, ALL_SHARES)
            exists = share < all_shares
            z_S += tl.load(share_3P + share, mask=exists, other=0.0)
            entropy_S += tl.load(share_3P + all_shares + share, mask=exists, other=0.0)
            highest = tl.load(share_3P + 2 * all_shares + share, mask=exists, other=float("-inf"))
            highest_S = tl.maximum(highest_S, highest)
        tl.store(z_sum, tl.sum(z_S, axis=0))
        tl.store(entropy_sum, tl.sum(entropy_S, axis=0))
        tl.store(logit_max, tl.max(highest_S, axis=0))


@triton.jit(do_not_specialize=["tokens", "scale"])
def backward_kernel(
    logits_TE,
    top_k_mask_TE,
    dscore_TE,
    dprob_sum_BE,
    dz_sum,
    dlogits_TE,
    tokens,
    E,
    scale,
    sigmoid: tl.constexpr,
    normalize: tl.constexpr,
    has_dscore: tl.constexpr,
    has_dprob: tl.constexpr,
    has_dz: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the gradient of the logits from those of weights, probability sums and z sum, as far as there are any."""
    sequence = tl.program_id(1)
    in_sequence_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_token_C = in_sequence_C < tokens
    expert_W = tl.arange(0, WIDTH)
    is_expert_W = expert_W < E
    exists = is_token_C[:, None] & is_expert_W[None, :]
    place_CW = (sequence * tokens + in_sequence_C).to(tl.int64)[:, None] * E + expert_W[None, :]
    _, softmax_CW, lse_C, _, affinity_CW, mass_C = _probabilities(logits_TE, place_CW, is_token_C, is_expert_W, sigmoid)
    daffinity_CW = tl.zeros((CHUNK, WIDTH), dtype=tl.float32)
    if has_dscore:
        dscore_CW = tl.load(dscore_TE + place_CW, mask=exists, other=0.0) * scale
        if normalize:
            chosen_CW = tl.load(top_k_mask_TE + place_CW, mask=exists, other=0) != 0
            chosen_mass_C = tl.sum(tl.where(chosen_CW, affinity_CW, 0.0), axis=1) + _SMALLEST
            # d(a/m): a gets dscore/m, and every chosen a loses the mean of dscore weighed by a, over m.
            weighed_C = tl.sum(dscore_CW * affinity_CW, axis=1) / chosen_mass_C
            dscore_CW = (dscore_CW - tl.where(chosen_CW, weighed_C[:, None], 0.0)) / chosen_mass_C[:, None]
        daffinity_CW += dscore_CW
    if has_dprob:
        dprob_CW = tl.load(dprob_sum_BE + sequence * E + expert_W, mask=is_expert_W, other=0.0)[None, :]
        if sigmoid:
            weighed_C = tl.sum(dprob_CW * affinity_CW, axis=1) / mass_C
            dprob_CW = (dprob_CW - weighed_C[:, None]) / mass_C[:, None]
        daffinity_CW += dprob_CW
    if sigmoid:
        dlogit_CW = daffinity_CW * affinity_CW * (1.0 - affinity_CW)
    else:
        dlogit_CW = affinity_CW * (daffinity_CW - tl.sum(daffinity_CW * affinity_CW, axis=1)[:, None])
    if has_dz:
        dlogit_CW += (2.0 * tl.load(dz_sum) * lse_C)[:, None] * softmax_CW
    tl.store(dlogits_TE + place_CW, dlogit_CW, mask=exists)


@triton.jit
def split_kernel(wide_TE, both_T2E, num_pairs, E, BLOCK: tl.constexpr):
    """Write each number as the sum of two bf16 numbers, the second in a column E further on."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < num_pairs
    wide = tl.load(wide_TE + pair, mask=exists, other=0.0)
    high = wide.to(tl.bfloat16)
    place = pair + pair // E * E
    tl.store(both_T2E + place, high, mask=exists)
    tl.store(both_T2E + place + E, (wide - high.to(tl.float32)).to(tl.bfloat16), mask=exists)
