"""How many parameters a decoder has, the bytes they need, and the arithmetic of a token, from ModelConfig alone.

Activations are not counted: they depend on the backend and on what is recomputed (launch/activations.py).
tests/model/test_counting.py compares every configuration with a built model.
"""

from dataclasses import dataclass

import torch

from model.config import ModelConfig, QKNorm, RouterKind
from moe_kernels import RoutingKind
from moe_kernels.routing.plan import row_capacity


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a decoder; tied embeddings count once."""

    total: int
    active: int  # those a token meets under top-K: K of the E experts, and the whole embedding and head
    active_matmul: (
        int  # of these, the ones multiplied with a token: no embedding look-up, norms or biases; head included
    )
    experts: int  # routed experts of all layers


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations of forward and backward per token, without recomputation.

    A matrix parameter costs 6: a multiplication and an addition, forward once and backward twice. Attention differs:
    ``causal`` counts the half of the S x S scores that the mask keeps (Megatron-Bridge, NeMo Automodel), ``noncausal``
    all of them (torchtitan). Rounding's extra rows, softmax, norms and the optimiser are not counted.
    """

    causal: float
    noncausal: float


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """What each part of a training process's state is kept in; the defaults are what training/ keeps."""

    parameters: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a training process's state over all ranks together: sharding divides them, replication repeats them."""

    parameters: int
    gradients: int  # of every parameter, until the optimiser has stepped
    moments: int  # AdamW's two per parameter; its step counts, 4 bytes a tensor, are left out
    buffers: int  # balancing biases of sigmoid routers, always fp32

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.moments + self.buffers


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Return the parameter counts of the decoder that ``config`` describes."""
    moe = config.moe
    num_moe_layers = _num_moe_layers(config)
    num_dense_layers = config.num_layers - num_moe_layers
    expert = 3 * config.width * moe.expert_width
    vocabulary = config.vocab_size * config.width
    matmul_elsewhere = (
        config.num_layers * _attention_matrices(config)
        + num_moe_layers * moe.num_experts * config.width  # routers
        + num_dense_layers * 3 * config.width * (config.dense_width or 0)
        + vocabulary  # head
    )
    vectors = config.num_layers * (2 * config.width + _attention_vectors(config)) + config.width
    embedding = 0 if config.tie_embeddings else vocabulary
    experts = num_moe_layers * moe.num_experts * expert
    active_matmul = matmul_elsewhere + num_moe_layers * moe.experts_per_token * expert
    return ParameterCount(
        total=matmul_elsewhere + experts + vectors + embedding,
        active=active_matmul + vectors + embedding,
        active_matmul=active_matmul,
        experts=experts,
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the decoder that ``config`` describes, by name, in the decoder's order."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        shapes[f"{block}.attention_norm.weight"] = (width,)
        shapes |= {f"{block}.attention.{name}": shape for name, shape in _attention_shapes(config).items()}
        shapes[f"{block}.mlp_norm.weight"] = (width,)
        if config.is_moe_layer(layer):
            E, N = config.moe.num_experts, config.moe.expert_width
            shapes |= {
                f"{block}.moe.w_gate_up": (E, 2 * N, width),
                f"{block}.moe.w_down": (E, width, N),
                f"{block}.moe.router.weight": (E, width),
            }
        else:
            assert config.dense_width is not None  # ModelConfig refuses dense layers without a width
            shapes |= {
                f"{block}.mlp.gate_proj.weight": (config.dense_width, width),
                f"{block}.mlp.up_proj.weight": (config.dense_width, width),
                f"{block}.mlp.down_proj.weight": (width, config.dense_width),
            }
    shapes["norm.weight"] = (width,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def routed_rows(config: ModelConfig, *, num_tokens: int, routing: RoutingKind | None = None) -> int:
    """Return R, the rows that a layer with experts allocates for a micro-batch of ``num_tokens``.

    They do not depend on which experts are chosen. ``routing`` is the training's unless given.
    """
    moe = config.moe
    return row_capacity(
        routing or moe.routing.train,
        T=num_tokens,
        E=moe.num_experts,
        K=moe.experts_per_token,
        tile_m=moe.routing.tile_m,
        rounding=moe.routing.rounding,
    )


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> FlopsPerToken:
    """Return a token's training FLOPs in sequences of ``sequence_length`` tokens."""
    attention = config.attention
    # Scores and their sum over values: two products of 2·S·H·A operations, each again twice in the backward pass.
    full = 12 * config.num_layers * sequence_length * attention.num_heads * attention.head_width
    matmul = 6 * count_parameters(config).active_matmul
    return FlopsPerToken(causal=matmul + full / 2, noncausal=matmul + full)


def state_bytes(config: ModelConfig, dtypes: StateDtypes | None = None) -> StateBytes:
    """Return the bytes of parameters, gradients, AdamW's moments and buffers that training ``config`` holds."""
    dtypes = dtypes or StateDtypes()
    total = count_parameters(config).total
    num_biases = _num_moe_layers(config) * config.moe.num_experts if config.moe.router is RouterKind.sigmoid else 0
    return StateBytes(
        parameters=total * dtypes.parameters.itemsize,
        gradients=total * dtypes.gradients.itemsize,
        moments=2 * total * dtypes.moments.itemsize,
        buffers=num_biases * torch.float32.itemsize,
    )


def kv_cache_bytes_per_token(config: ModelConfig, *, dtype: torch.dtype) -> int:
    """Return what decoding remembers of one token of one sequence: its keys and values in every layer."""
    return 2 * config.num_layers * config.attention.key_width * dtype.itemsize


def _num_moe_layers(config: ModelConfig) -> int:
    return sum(config.is_moe_layer(layer) for layer in range(config.num_layers))


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    attention = config.attention
    query_width, key_width = attention.query_width, attention.key_width
    widths = {"qkv_proj": (sum(attention.qkv_widths), config.width), "o_proj": (config.width, query_width)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in widths.items():
        shapes[f"{name}.weight"] = shape
        if attention.bias:
            shapes[f"{name}.bias"] = shape[:1]
    if attention.qk_norm is QKNorm.full_width:
        shapes |= {"q_norm.weight": (query_width,), "k_norm.weight": (key_width,)}
    elif attention.qk_norm is QKNorm.per_head:
        shapes |= {"q_norm.weight": (attention.head_width,), "k_norm.weight": (attention.head_width,)}
    return shapes


def _attention_matrices(config: ModelConfig) -> int:
    query_width, key_width = config.attention.query_width, config.attention.key_width
    return config.width * (2 * query_width + 2 * key_width)


def _attention_vectors(config: ModelConfig) -> int:
    query_width, key_width = config.attention.query_width, config.attention.key_width
    biases = query_width + 2 * key_width + config.width if config.attention.bias else 0
    if config.attention.qk_norm is QKNorm.full_width:
        return biases + query_width + key_width
    if config.attention.qk_norm is QKNorm.per_head:
        return biases + 2 * config.attention.head_width
    return biases
