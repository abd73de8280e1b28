"""The exact top-K of each token: values compared in fp32, ties to the lower expert, as in routing/ranking.py.

For token rounding the same launch leaves what the experts' margins are found in: probabilities and choice transposed,
so that an expert reads its column in one piece, and the experts' counts.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.operators import operator

_ELEMENTS = 2048  # (token, expert) pairs of one program
_PER_THREAD = 16  # of them; with 32 the router's kernels spill registers

ChoiceTensors = tuple[Tensor, Tensor, Tensor, Tensor]


class Chosen(NamedTuple):
    """Each token's top-K choice, and what token rounding reads."""

    top_k_mask_TE: Tensor  # bool
    count_E: Tensor  # int32, pairs of each expert; zero unless transposed
    prob_ET: Tensor  # fp32; empty unless transposed
    top_k_mask_ET: Tensor  # bool; empty unless transposed


class Block(NamedTuple):
    """The (token, expert) pairs that one program looks at together."""

    width: int  # E rounded up to a power of two: lanes past E idle
    chunk: int  # tokens
    num_warps: int


def block_of(E: int) -> Block:
    """Return the block of the kernels that see all experts of a token; at least 4 tokens, so that writes are whole."""
    width = max(16, triton.next_power_of_2(E))
    chunk = max(4, _ELEMENTS // width)
    return Block(width, chunk, num_warps=width * chunk // (32 * _PER_THREAD))


def choose(value_TE: Tensor, bias_E: Tensor | None, K: int, *, transposed: bool) -> Chosen:
    """Return each token's K highest ``value_TE + bias_E``, and ``value_TE`` with the choice transposed if asked for."""
    return Chosen(*torch.ops.gristmill.choose_top_k(value_TE, bias_E, K, transposed))


@operator("choose_top_k")
def _choose_top_k(value_TE: Tensor, bias_E: Tensor | None, K: int, transposed: bool) -> ChoiceTensors:
    T, E = value_TE.shape
    value_TE = value_TE.contiguous()
    chosen = Chosen(*_empty(value_TE, bias_E, K, transposed))
    chosen.count_E.zero_()
    if T > 0:
        block = block_of(E)
        _choose[(triton.cdiv(T, block.chunk),)](
            value_TE,
            value_TE if bias_E is None else bias_E.contiguous(),
            chosen.top_k_mask_TE.view(torch.int8),
            chosen.count_E,
            chosen.prob_ET,
            chosen.top_k_mask_ET.view(torch.int8),
            T,
            E,
            K,
            biased=bias_E is not None,
            transposed=transposed,
            WIDTH=block.width,
            CHUNK=block.chunk,
            num_warps=block.num_warps,
        )
    return chosen.top_k_mask_TE, chosen.count_E, chosen.prob_ET, chosen.top_k_mask_ET


@_choose_top_k.register_fake
def _empty(value_TE: Tensor, bias_E: Tensor | None, K: int, transposed: bool) -> ChoiceTensors:
    T, E = value_TE.shape
    transposed_shape = (E, T) if transposed else (0, 0)
    return (
        value_TE.new_empty((T, E), dtype=torch.bool),
        value_TE.new_empty((E,), dtype=torch.int32),
        value_TE.new_empty(transposed_shape, dtype=torch.float32),
        value_TE.new_empty(transposed_shape, dtype=torch.bool),
    )


@triton.jit
def ordered_bits(value):
    """Return int32 that order as the fp32 values do; -0 equals 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return ((bits >> 31) & 0x7FFFFFFF) ^ bits


@triton.jit
def top_k_of(value_CW, expert_W, E, K, WIDTH: tl.constexpr):
    """Return the mask of each row's K highest values among the first E, ties to the lower column."""
    lowest = -2147483648
    key_CW = tl.where((expert_W < E)[None, :], tl.maximum(ordered_bits(value_CW), lowest + 1), lowest)
    for _ in range(K):
        # Two reductions of 32 bits: where a row lies in one warp, each is one instruction.
        is_best = key_CW == tl.max(key_CW, axis=1)[:, None]
        first_C = tl.min(tl.where(is_best, expert_W[None, :], WIDTH), axis=1)
        key_CW = tl.where(expert_W[None, :] == first_C[:, None], lowest, key_CW)
    return (expert_W < E)[None, :] & (key_CW == lowest)


@triton.jit
def store_transposed(prob_ET, top_k_mask_ET, prob_CW, chosen_CW, token_C, expert_W, exists, T):
    """Write a chunk of probabilities and choices to their (E, T) tensors."""
    place_CW = expert_W.to(tl.int64)[None, :] * T + token_C[:, None]
    tl.store(prob_ET + place_CW, prob_CW, mask=exists)
    tl.store(top_k_mask_ET + place_CW, chosen_CW.to(tl.int8), mask=exists)


@triton.jit(do_not_specialize=["K"])
def _choose(
    value_TE,
    bias_E,
    top_k_mask_TE,
    count_E,
    prob_ET,
    top_k_mask_ET,
    T,
    E,
    K,
    biased: tl.constexpr,
    transposed: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    token_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert_W = tl.arange(0, WIDTH)
    exists = (token_C < T)[:, None] & (expert_W < E)[None, :]
    place_CW = token_C.to(tl.int64)[:, None] * E + expert_W[None, :]
    value_CW = tl.load(value_TE + place_CW, mask=exists, other=0.0).to(tl.float32)
    choice_CW = value_CW
    if biased:
        choice_CW += tl.load(bias_E + expert_W, mask=expert_W < E, other=0.0).to(tl.float32)[None, :]
    chosen_CW = top_k_of(choice_CW, expert_W, E, K, WIDTH)
    tl.store(top_k_mask_TE + place_CW, chosen_CW.to(tl.int8), mask=exists)
    if transposed:
        store_transposed(prob_ET, top_k_mask_ET, value_CW, chosen_CW, token_C, expert_W, exists, T)
        count_W = tl.sum((chosen_CW & exists).to(tl.int32), axis=0)
        tl.atomic_add(count_E + expert_W, count_W, mask=expert_W < E)  # integers: any order gives the same sum
