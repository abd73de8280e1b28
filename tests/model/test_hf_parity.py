"""Random small decoders compute what transformers computes: logits, and the gradient of every parameter."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import ModelConfig, QKNorm
from moe_kernels import BackendName
from tests.model.tiny_models import build, hf_twin, in_our_layout, relative_difference, tiny_config, token_ids

# fp32 has eps 1.2e-7; sums over some hundred terms in another order differ by some ten of them.
TOLERANCE = 1e-5

QWEN = {"qk_norm": QKNorm.per_head}
OLMOE_SETTINGS = {
    "released": {},
    "gqa": {"attention": {"num_kv_heads": 2}},
    "tied": {"tie_embeddings": True},
    "normalised": {"moe": {"normalize_top_k": True}},
    "theta": {"attention": {"rope_theta": 5e5}},
    "bias": {"attention": {"bias": True}},
    "clip": {"attention": {"clip_qkv": 0.8}},
    "eps": {"norm_eps": 1e-2},
    "one_expert_of_many": {"moe": {"experts_per_token": 1}},
    "every_expert": {"moe": {"experts_per_token": 8}},
    "all_at_once": {
        "attention": {"num_kv_heads": 1, "bias": True, "clip_qkv": 0.8, "rope_theta": 1e6},
        "moe": {"normalize_top_k": True},
        "tie_embeddings": True,
    },
}
QWEN_SETTINGS = {
    "released": {"attention": QWEN, "moe": {"normalize_top_k": True}},
    "not_normalised": {"attention": QWEN},
    "head_width_and_gqa": {"attention": {**QWEN, "num_kv_heads": 2, "head_width": 24}},
    "tied": {"attention": QWEN, "tie_embeddings": True},
    "theta": {"attention": {**QWEN, "rope_theta": 1e6}},
    "bias": {"attention": {**QWEN, "bias": True}},
    "dense_layers": {"attention": QWEN, "dense_layers": [0, 2], "dense_width": 40},
    "every_second_layer": {"attention": QWEN, "moe_every": 2, "dense_width": 40},
    "all_at_once": {
        "attention": {**QWEN, "num_kv_heads": 1, "head_width": 4, "bias": True, "rope_theta": 1e6},
        "moe": {"normalize_top_k": True},
        "dense_layers": [1],
        "dense_width": 24,
        "tie_embeddings": True,
        "norm_eps": 1e-6,
    },
}


def assert_equal_to_transformers(config: ModelConfig, backend: BackendName = BackendName.reference) -> None:
    decoder = build(config, backend=backend)
    twin = hf_twin(decoder)
    input_ids, labels = token_ids(config)

    logits = decoder(input_ids).logits_BSV
    expected_logits = twin(input_ids=input_ids).logits
    assert relative_difference(logits, expected_logits) <= TOLERANCE

    ce_sum = decoder(input_ids, labels).ce_sum
    expected_ce_sum = F.cross_entropy(expected_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert relative_difference(ce_sum, expected_ce_sum) <= TOLERANCE

    ce_sum.backward()
    expected_ce_sum.backward()
    expected: dict[str, Tensor] = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert relative_difference(parameter.grad, in_our_layout(expected, name)) <= TOLERANCE, name


@pytest.mark.parametrize("setting", OLMOE_SETTINGS)
def test_logits_and_gradients_equal_olmoe_of_transformers(setting):
    assert_equal_to_transformers(tiny_config(**OLMOE_SETTINGS[setting]))


@pytest.mark.parametrize("setting", QWEN_SETTINGS)
def test_logits_and_gradients_equal_qwen3_moe_of_transformers(setting):
    assert_equal_to_transformers(tiny_config(**QWEN_SETTINGS[setting]))


def test_the_portable_backend_gives_the_same_parity():
    assert_equal_to_transformers(tiny_config(), BackendName.portable)


def test_clipping_limits_something_in_the_tests_above():
    input_ids, _ = token_ids(tiny_config())
    clipped = build(tiny_config(**OLMOE_SETTINGS["clip"]))(input_ids).logits_BSV
    free = build(tiny_config())(input_ids).logits_BSV
    assert relative_difference(clipped, free) > 100 * TOLERANCE


def test_bf16_logits_equal_transformers_as_closely_as_bf16_allows():
    config = tiny_config()
    decoder = build(config)
    twin = hf_twin(decoder)
    input_ids, _ = token_ids(config)
    truth = twin(input_ids=input_ids).logits
    theirs = relative_difference(twin.to(torch.bfloat16)(input_ids=input_ids).logits, truth)
    ours = relative_difference(decoder.to(torch.bfloat16)(input_ids).logits_BSV, truth)
    # Their router logits are rounded to bf16 and ours are not, so the two err differently; neither errs twice as much.
    assert 0 < ours <= 2 * theirs
