"""Small decoders for the tests of this folder, and transformers' twins with the same weights."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.config import AttentionConfig, ModelConfig, MoEConfig, QKNorm, RoutingConfig
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, resolve_backend

CPU = torch.device("cpu")


def tiny_config(*, attention: dict | None = None, moe: dict | None = None, **changes) -> ModelConfig:
    """Return an OLMoE of a few thousand parameters, with fields of its parts replaced."""
    config = ModelConfig(
        vocab_size=101,
        width=32,
        num_layers=3,
        max_positions=64,
        init_std=0.1,
        attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_width=8),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_width=16, routing=RoutingConfig(tile_m=8)),
    )
    return replace(
        config,
        attention=replace(config.attention, **(attention or {})),
        moe=replace(config.moe, **(moe or {})),
        **changes,
    )


def build(
    config: ModelConfig,
    *,
    seed: int = 0,
    backend: BackendName = BackendName.reference,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    **options,
) -> Decoder:
    """Return an initialised decoder whose norms and biases are random too, so that a test sees what they do.

    ``options`` are others of ``Decoder``.
    """
    problem = moe_problem(config, tokens=64, dtype=dtype, device=device)
    decoder = Decoder(config, backend=resolve_backend(backend, problem), **options)
    decoder.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return decoder.to(device, dtype)


def token_ids(config: ModelConfig, *, sequences: int = 3, positions: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random input ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (sequences, positions + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return ids[:, :-1], labels


def hf_twin(decoder: Decoder) -> nn.Module:
    """Return transformers' model of the same shape with the same weights; QK-norm says which family it is."""
    config = decoder.config
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "attention_bias": config.attention.bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.attention.rope_theta},
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "norm_topk_prob": config.moe.normalize_top_k,
        "pad_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",
    }
    if config.attention.qk_norm is QKNorm.full_width:
        twin = OlmoeForCausalLM(
            OlmoeConfig(intermediate_size=config.moe.expert_width, clip_qkv=config.attention.clip_qkv, **common)
        )
    else:
        twin = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                head_dim=config.attention.head_width,
                moe_intermediate_size=config.moe.expert_width,
                intermediate_size=config.dense_width or 16,
                mlp_only_layers=config.dense_layers,
                decoder_sparse_step=config.moe_every,
                **common,
            )
        )
    theirs = dict(twin.named_parameters())
    ours = dict(decoder.named_parameters())
    assert {hf for name in ours for hf in hf_names(name)} == set(theirs)
    with torch.no_grad():
        for name, parameter in ours.items():
            parts = [theirs[hf] for hf in hf_names(name)]
            for part, values in zip(parts, parameter.split([len(part) for part in parts]), strict=True):
                part.copy_(values)
    return twin


def hf_names(name: str) -> list[str]:
    """Return the names that transformers 5 gives a parameter in memory, or its rows one after the other."""
    if name == "lm_head.weight":
        return [name]
    if "qkv_proj" in name:
        return [hf for part in ("q_proj", "k_proj", "v_proj") for hf in hf_names(name.replace("qkv_proj", part))]
    for ours, theirs in (
        ("embed.", "embed_tokens."),
        ("blocks.", "layers."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        (".attention.", ".self_attn."),
        ("moe.router.", "mlp.gate."),
        ("moe.w_gate_up", "mlp.experts.gate_up_proj"),
        ("moe.w_down", "mlp.experts.down_proj"),
    ):
        name = name.replace(ours, theirs)
    return [f"model.{name}"]


def in_our_layout(theirs: Mapping[str, Tensor], name: str) -> Tensor:
    """Return what transformers has, by its names, for our parameter ``name``."""
    return torch.cat([theirs[hf] for hf in hf_names(name)])


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖ in fp64; ``expected`` may not be zero."""
    norm = expected.double().norm()
    assert norm > 0
    return ((actual.double() - expected.double()).norm() / norm).item()
