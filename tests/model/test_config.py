"""A configuration that can't work is refused when it is made, naming the knob."""

import pytest

from model.config import RoutingConfig
from moe_kernels import RoutingKind
from tests.model.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("knob", "changes"),
    [
        ("model.vocab_size", {"vocab_size": 0}),
        ("model.num_layers", {"num_layers": 0}),
        ("model.moe_every", {"moe_every": 0}),
        ("model.norm_eps", {"norm_eps": 0.0}),
        ("model.init_std", {"init_std": float("nan")}),
        ("model.dense_layers", {"dense_layers": [3], "dense_width": 8}),
        ("model.dense_layers", {"dense_layers": [0, 1, 2], "dense_width": 8}),
        ("model.dense_width", {"dense_layers": [0]}),
        ("model.dense_width", {"moe_every": 2}),
        ("model.dense_width", {"dense_layers": [0], "dense_width": 0}),
        ("model.attention.num_kv_heads", {"attention": {"num_kv_heads": 3}}),
        ("model.attention.num_heads", {"attention": {"num_heads": 0}}),
        ("model.attention.head_width", {"attention": {"head_width": 7}}),
        ("model.attention.rope_theta", {"attention": {"rope_theta": 0.0}}),
        ("model.attention.clip_qkv", {"attention": {"clip_qkv": 0.0}}),
        ("model.moe.experts_per_token", {"moe": {"experts_per_token": 9}}),
        ("model.moe.experts_per_token", {"moe": {"experts_per_token": 0}}),
        ("model.moe.expert_width", {"moe": {"expert_width": 0}}),
        ("model.moe.routed_scale", {"moe": {"routed_scale": 0.0}}),
        ("model.moe.normalize_top_k", {"moe": {"experts_per_token": 1, "normalize_top_k": True}}),
    ],
)
def test_what_cannot_work_is_refused_by_name(knob, changes):
    with pytest.raises(ValueError, match=knob.replace(".", r"\.")):
        tiny_config(**changes)


def test_tiles_without_rows_and_evaluation_by_rounding_are_refused():
    with pytest.raises(ValueError, match=r"model\.moe\.routing\.tile_m"):
        RoutingConfig(tile_m=0)
    with pytest.raises(ValueError, match=r"model\.moe\.routing\.evaluation"):
        RoutingConfig(evaluation=RoutingKind.token_rounding)


def test_dense_layers_and_every_second_layer_combine_as_in_transformers():
    config = tiny_config(num_layers=6, moe_every=2, dense_layers=[3], dense_width=8)
    assert [layer for layer in range(6) if config.is_moe_layer(layer)] == [1, 5]
