"""Counts from a configuration equal those of the model built from it, and the numbers that were published."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from model.config import ModelConfig, RouterKind, RoutingConfig
from model.counting import (
    StateDtypes,
    count_parameters,
    flops_per_token,
    kv_cache_bytes_per_token,
    parameter_shapes,
    routed_rows,
    state_bytes,
)
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, RoutingKind, resolve_backend
from tests.model.tiny_models import CPU, build, tiny_config, token_ids

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL_FILES = sorted((CONFIGS / "model").glob("*.yaml"))
ROUTING_FILES = sorted((CONFIGS / "routing").glob("*.yaml"))


def load(file: Path, schema: type):
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(file)))


def load_model(name: str) -> ModelConfig:
    return load(CONFIGS / "model" / f"{name}.yaml", ModelConfig)


def built_on_meta(config: ModelConfig) -> Decoder:
    backend = resolve_backend(BackendName.reference, moe_problem(config, tokens=1024, dtype=torch.float32, device=CPU))
    with torch.device("meta"):
        return Decoder(config, backend=backend)


def assert_counts_equal_the_built_model(config: ModelConfig) -> None:
    decoder = built_on_meta(config)
    sizes = {name: parameter.numel() for name, parameter in decoder.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".moe.w_" in name)
    idle = experts - experts * config.moe.experts_per_token // config.moe.num_experts
    vectors = sum(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 1)
    look_up = 0 if config.tie_embeddings else sizes["embed.weight"]
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    assert count.experts == experts
    assert count.active == sum(sizes.values()) - idle
    assert count.active_matmul == sum(sizes.values()) - idle - vectors - look_up
    built = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())


def test_there_is_a_file_for_every_named_shape():
    assert {file.stem for file in MODEL_FILES} == {
        "tiny",
        "olmoe_1b_7b",
        "qwen3_30b_a3b",
        "qwen3_235b_a22b",
        "sonic_0_5b_8_64",
        "sonic_0_5b_2_64",
        "sonic_1_8b_8_256",
        "sonic_1_4b_8_128",
        "sonic_1_4b_2_128",
        "sonic_7b",
    }


@pytest.mark.parametrize("file", MODEL_FILES, ids=lambda file: file.stem)
def test_counts_equal_the_built_model(file):
    assert_counts_equal_the_built_model(load(file, ModelConfig))


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(tie_embeddings=True, dense_layers=[1], dense_width=24),
        tiny_config(moe_every=3, dense_width=24),
        tiny_config(attention={"bias": True, "num_kv_heads": 2, "head_width": 24}),
        tiny_config(moe={"router": RouterKind.sigmoid}),
    ],
    ids=["tied_and_dense", "every_third", "bias_and_gqa", "sigmoid"],
)
def test_counts_equal_the_built_model_for_rare_settings(config):
    assert_counts_equal_the_built_model(config)


@pytest.mark.parametrize("file", [*MODEL_FILES, *ROUTING_FILES], ids=lambda file: file.stem)
def test_every_file_opens_with_a_comment_that_says_what_it_is(file):
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize("file", ROUTING_FILES, ids=lambda file: file.stem)
def test_routing_files_hold_keys_of_the_routing_config(file):
    assert load(file, RoutingConfig).train.name == file.stem


def test_flops_equal_the_published_shapes_by_hand():
    """The expected numbers count matrices one by one, at 4,096 tokens per sequence."""
    olmoe_matrices = 16 * (4 * 2048**2 + 64 * 2048 + 8 * 3 * 2048 * 1024) + 50304 * 2048
    olmoe = flops_per_token(load_model("olmoe_1b_7b"), sequence_length=4096)
    assert olmoe.causal == 6 * olmoe_matrices + 16 * 6 * 4096 * 2048
    assert olmoe.causal == pytest.approx(7.88e9, abs=0.005e9)
    assert olmoe.noncausal == pytest.approx(8.68e9, abs=0.005e9)
    assert count_parameters(load_model("olmoe_1b_7b")).active_matmul == pytest.approx(1.179e9, abs=0.0005e9)

    qwen_matrices = 48 * (2048 * 128 * (2 * 32 + 2 * 4) + 128 * 2048 + 8 * 3 * 2048 * 768) + 151936 * 2048
    qwen = flops_per_token(load_model("qwen3_30b_a3b"), sequence_length=4096)
    assert qwen.causal == 6 * qwen_matrices + 48 * 6 * 4096 * 32 * 128
    assert qwen.causal == pytest.approx(23.08e9, abs=0.005e9)
    assert qwen.noncausal == pytest.approx(27.91e9, abs=0.005e9)
    assert count_parameters(load_model("qwen3_30b_a3b")).active_matmul == pytest.approx(3.042e9, abs=0.0005e9)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("olmoe_1b_7b", 6.92e9, 1.28e9),
        ("qwen3_30b_a3b", 30.5e9, 3.35e9),
        ("qwen3_235b_a22b", 235e9, 22.2e9),
        ("sonic_0_5b_8_64", 0.5e9, None),
        ("sonic_0_5b_2_64", 0.5e9, None),
        ("sonic_1_8b_8_256", 1.8e9, None),
        ("sonic_1_4b_8_128", 1.4e9, None),
        ("sonic_1_4b_2_128", 1.4e9, None),
    ],
)
def test_sizes_are_those_in_the_names(name, total, active):
    count = count_parameters(load_model(name))
    assert count.total == pytest.approx(total, rel=0.05)
    if active is not None:
        assert count.active == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_process_that_took_a_step(dtype):
    config = tiny_config(moe={"router": RouterKind.sigmoid}, dense_layers=[1], dense_width=24)
    decoder = build(config, dtype=dtype)
    optimizer = torch.optim.AdamW(decoder.parameters())
    decoder(*token_ids(config)).ce_sum.backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    counted = state_bytes(config, StateDtypes(parameters=dtype, gradients=dtype, moments=dtype))
    assert counted.parameters == sum(parameter.nbytes for parameter in decoder.parameters())
    assert counted.gradients == sum(parameter.grad.nbytes for parameter in decoder.parameters())
    assert counted.moments == sum(moment.nbytes for moment in moments)
    assert counted.buffers == sum(buffer.nbytes for buffer in decoder.buffers()) > 0
    assert counted.total == counted.parameters + counted.gradients + counted.moments + counted.buffers


def test_bytes_of_the_published_shapes():
    """By hand: 16 bytes a parameter in fp32; 16 layers of 16 heads and 48 of 4, all of width 128, twice 2 bytes."""
    olmoe, qwen = load_model("olmoe_1b_7b"), load_model("qwen3_30b_a3b")
    assert state_bytes(olmoe).total == 16 * count_parameters(olmoe).total
    assert kv_cache_bytes_per_token(olmoe, dtype=torch.bfloat16) == 16 * 16 * 128 * 2 * 2
    assert kv_cache_bytes_per_token(qwen, dtype=torch.bfloat16) == 48 * 4 * 128 * 2 * 2


@pytest.mark.parametrize("routing", [RoutingKind.top_k, RoutingKind.token_rounding])
def test_rows_are_those_that_a_forward_allocates(routing):
    config = tiny_config()
    decoder = build(config)
    (moe, *_) = decoder.moe_layers()
    routed = moe.router(torch.randn(96, config.width), routing=routing, seed=0)
    assert routed_rows(config, num_tokens=96, routing=routing) == routed.routing.plan.R > 0
