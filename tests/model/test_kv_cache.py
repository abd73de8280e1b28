"""Decoding with a cache gives the logits of the whole sequence, and a cache is a value that nothing changes."""

import math

import pytest
import torch

from model.config import QKNorm
from model.counting import kv_cache_bytes_per_token
from model.kv_cache import empty_kv_cache
from moe_kernels import BackendName, RoutingKind
from tests.model.tiny_models import build, relative_difference, tiny_config, token_ids

CONFIGS = {
    "olmoe": tiny_config(),
    "olmoe_all": tiny_config(
        attention={"num_kv_heads": 2, "bias": True, "clip_qkv": 0.8, "rope_theta": 500.0},
        moe={"normalize_top_k": True},
        tie_embeddings=True,
    ),
    "qwen3_moe_all": tiny_config(
        attention={"qk_norm": QKNorm.per_head, "num_kv_heads": 1, "head_width": 12, "bias": True},
        moe={"normalize_top_k": True},
        dense_layers=[1],
        dense_width=24,
    ),
}
# A product of another shape may sum its terms in another order: at most 16 roundings a layer (norms, projections,
# rotation, softmax, values, router, experts, residuals) over sums of `width` terms, with errors of random sign.
ROUNDINGS_PER_LAYER = 16


def tolerance(config, dtype=torch.float32) -> float:
    roundings = ROUNDINGS_PER_LAYER * config.num_layers * (config.width if dtype == torch.float32 else 1)
    return torch.finfo(dtype).eps * math.sqrt(roundings)


def in_pieces(decoder, input_ids, sizes, *, dtype=torch.float32):
    cache = empty_kv_cache(decoder.config, num_sequences=len(input_ids), dtype=dtype, device="cpu")
    logits = []
    for piece in input_ids.split(sizes, dim=1):
        output = decoder(piece, cache=cache)
        cache = output.cache
        logits.append(output.logits_BSV)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("backend", [BackendName.reference, BackendName.portable])
@pytest.mark.parametrize("sizes", [[16], [10, 1, 1, 1, 1, 1, 1], [1] * 16, [5, 7, 4]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_those_of_the_whole_sequence(name, sizes, backend):
    decoder = build(CONFIGS[name], backend=backend)
    input_ids, _ = token_ids(decoder.config)
    with torch.no_grad():
        whole = decoder(input_ids).logits_BSV
        logits, cache = in_pieces(decoder, input_ids, sizes)
    assert cache.num_positions == 16
    for position in range(16):
        assert relative_difference(logits[:, position], whole[:, position]) <= tolerance(decoder.config), position


def test_cached_logits_in_bf16_equal_the_whole_sequence_as_closely_as_bf16_allows():
    decoder = build(CONFIGS["qwen3_moe_all"], dtype=torch.bfloat16)
    input_ids, _ = token_ids(decoder.config)
    with torch.no_grad():
        whole = decoder(input_ids).logits_BSV
        logits, cache = in_pieces(decoder, input_ids, [8, *[1] * 8], dtype=torch.bfloat16)
    assert logits.dtype == cache.layers[0].key_BGSA.dtype == torch.bfloat16
    # The median token: where two experts nearly tie, few digits send a token to another one.
    differences = [
        relative_difference(ours, theirs)
        for ours, theirs in zip(logits.flatten(0, 1), whole.flatten(0, 1), strict=True)
    ]
    assert sorted(differences)[len(differences) // 2] <= tolerance(decoder.config, torch.bfloat16)


def test_gradients_pass_through_a_cache():
    decoder = build(CONFIGS["olmoe_all"])
    input_ids, labels = token_ids(decoder.config)
    decoder(input_ids, labels).ce_sum.backward()
    expected = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    cache = empty_kv_cache(decoder.config, num_sequences=3, dtype=torch.float32, device="cpu")
    first = decoder(input_ids[:, :9], labels[:, :9], cache=cache)
    (first.ce_sum + decoder(input_ids[:, 9:], labels[:, 9:], cache=first.cache).ce_sum).backward()
    for name, parameter in decoder.named_parameters():
        assert relative_difference(parameter.grad, expected[name]) <= 1e-5, name


def test_a_cache_is_never_changed_so_two_texts_may_go_on_from_one():
    decoder = build(CONFIGS["olmoe"])
    input_ids, _ = token_ids(decoder.config, sequences=1)
    other_ids = input_ids.clone()
    other_ids[:, 10:] = (input_ids[:, 10:] + 1) % decoder.config.vocab_size
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    with torch.no_grad():
        _, prefix = in_pieces(decoder, input_ids[:, :10], [10])
        kept = [tensor.clone() for layer in prefix.layers for tensor in layer]
        ends = [decoder(ids[:, 10:], cache=prefix).logits_BSV for ids in (input_ids, other_ids)]
        whole = [decoder(ids).logits_BSV[:, 10:] for ids in (input_ids, other_ids)]
    for end, expected in zip(ends, whole, strict=True):
        assert relative_difference(end, expected) <= tolerance(decoder.config)
    assert all(torch.equal(a, b) for a, b in zip(kept, [t for layer in prefix.layers for t in layer], strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in decoder.state_dict().items())


def test_no_cache_is_kept_where_none_was_given():
    decoder = build(CONFIGS["olmoe"])
    assert decoder(token_ids(decoder.config)[0]).cache is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_holds_the_bytes_that_counting_says(name, dtype):
    decoder = build(CONFIGS[name], dtype=dtype)
    input_ids, _ = token_ids(decoder.config)
    _, cache = in_pieces(decoder, input_ids, [16], dtype=dtype)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert held == kv_cache_bytes_per_token(decoder.config, dtype=dtype) * input_ids.numel()


@pytest.mark.parametrize("routing", [RoutingKind.token_rounding, RoutingKind.expert_choice])
def test_routings_that_look_at_the_whole_micro_batch_are_refused_with_a_cache(routing):
    decoder = build(CONFIGS["olmoe"])
    cache = empty_kv_cache(decoder.config, num_sequences=1, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=rf"routing={routing.name} with a cache.*routing=top_k"):
        decoder(torch.zeros(1, 4, dtype=torch.int64), routing=routing, cache=cache)


def test_a_cache_that_does_not_fit_is_refused_in_words():
    decoder = build(CONFIGS["olmoe"])
    ids = torch.zeros(2, 60, dtype=torch.int64)
    with torch.no_grad():
        _, cache = in_pieces(decoder, ids, [60])
    with pytest.raises(ValueError, match=r"65 tokens exceed model\.max_positions=64"):
        decoder(ids[:, :5], cache=cache)
    with pytest.raises(ValueError, match=r"of 2 sequences and 3 layers, but 1 sequences"):
        decoder(ids[:1, :1], cache=cache)
