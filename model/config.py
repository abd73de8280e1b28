"""The shape of a decoder and how its experts are chosen: dataclasses only.

Values live in configs/model/ and configs/routing/; checks that need more than one part of a run are in
training/config.py. The names are those of a run's config.yaml, so renaming one changes a file format.
"""

from dataclasses import dataclass, field
from enum import Enum

from moe_kernels import Rounding, RoutingKind


class QKNorm(Enum):
    """Which RMSNorm queries and keys pass through before the rotary embedding."""

    none = "none"
    full_width = "full_width"  # one weight over all heads together, (H·A,) and (G·A,): OLMoE
    per_head = "per_head"  # one weight of head_width shared by all heads, (A,): Qwen3


class RouterKind(Enum):
    """How router logits become the probabilities that rank experts and weigh their outputs."""

    softmax = "softmax"  # softmax over all experts in fp32, then top-K: OLMoE, Qwen3
    sigmoid = "sigmoid"  # independent sigmoids, chosen with a balancing bias that never weighs: DeepSeek-V3


@dataclass(kw_only=True, slots=True)
class RoutingConfig:
    """Which (token, expert) pairs are computed, in training and in evaluation."""

    train: RoutingKind = RoutingKind.token_rounding
    evaluation: RoutingKind = RoutingKind.top_k
    rounding: Rounding = Rounding.nearest  # read by token rounding only
    tile_m: int = 128  # rows; token rounding makes every expert's count a multiple of it
    allow_below_one_tile: bool = False  # train even where an expert gets less than one tile of tokens on average

    def __post_init__(self) -> None:
        if self.tile_m < 1:
            raise ValueError(f"model.moe.routing.tile_m={self.tile_m} must be at least 1")
        if self.evaluation is not RoutingKind.top_k:
            raise ValueError(
                f"model.moe.routing.evaluation={self.evaluation.name}: evaluation and every exported model route by "
                "plain top-K; held-out loss under the training routing is logged beside it"
            )


@dataclass(kw_only=True, slots=True)
class MoEConfig:
    """The routed experts of one layer: E experts of width N, K of them for each token."""

    num_experts: int
    experts_per_token: int
    expert_width: int
    router: RouterKind = RouterKind.softmax
    normalize_top_k: bool = False  # divide a pair's probability by its token's top-K mass
    routed_scale: float = 1.0  # factor on every pair's weight (DeepSeek-V3: 2.5)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.moe.experts_per_token={self.experts_per_token} must lie between 1 and "
                f"model.moe.num_experts={self.num_experts}"
            )
        if self.expert_width < 1:
            raise ValueError(f"model.moe.expert_width={self.expert_width} must be at least 1")
        if not self.routed_scale > 0:
            raise ValueError(f"model.moe.routed_scale={self.routed_scale} must be above 0: it multiplies every weight")
        if self.normalize_top_k and self.experts_per_token == 1:
            raise ValueError(
                "model.moe.normalize_top_k=true with model.moe.experts_per_token=1 makes every weight 1, "
                "so the router would get no gradient: set normalize_top_k=false"
            )


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Grouped-query attention: H query heads and G key/value heads of width A."""

    num_heads: int
    num_kv_heads: int
    head_width: int
    qk_norm: QKNorm = QKNorm.full_width
    rope_theta: float = 10_000.0
    bias: bool = False
    clip_qkv: float | None = None  # clamp queries, keys and values to ±this before the heads are split

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"model.attention.num_heads={self.num_heads} must be a multiple of "
                f"model.attention.num_kv_heads={self.num_kv_heads}, and both at least 1"
            )
        if self.head_width < 2 or self.head_width % 2 != 0:
            raise ValueError(f"model.attention.head_width={self.head_width} must be even: rotary pairs need it")
        if not self.rope_theta > 0:
            raise ValueError(f"model.attention.rope_theta={self.rope_theta} must be above 0")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise ValueError(
                f"model.attention.clip_qkv={self.clip_qkv} must be above 0; model.attention.clip_qkv=null clips nothing"
            )

    @property
    def query_width(self) -> int:
        """H · A, the numbers in a token's queries."""
        return self.num_heads * self.head_width

    @property
    def key_width(self) -> int:
        """G · A, the numbers in a token's keys, and in its values."""
        return self.num_kv_heads * self.head_width

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """The numbers in a token's queries, keys and values, which one product makes in this order."""
        return self.query_width, self.key_width, self.key_width


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer whose feed-forward layers are routed experts, or dense where said."""

    vocab_size: int  # rows of the embedding; may exceed the tokenizer's size, never fall below it
    width: int
    num_layers: int
    attention: AttentionConfig
    moe: MoEConfig
    max_positions: int = 4096
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    dense_layers: list[int] = field(default_factory=list)  # indices of layers with a dense MLP (HF: mlp_only_layers)
    moe_every: int = 1  # layer l has experts if (l + 1) % moe_every == 0 (HF: decoder_sparse_step)
    dense_width: int | None = None  # width of those dense MLPs

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "max_positions", "moe_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0")
        if self.dense_width is not None and self.dense_width < 1:
            raise ValueError(f"model.dense_width={self.dense_width} must be at least 1")
        foreign = [layer for layer in self.dense_layers if not 0 <= layer < self.num_layers]
        if foreign:
            raise ValueError(f"model.dense_layers names {foreign}, but model.num_layers={self.num_layers}")
        if not all(self.is_moe_layer(layer) for layer in range(self.num_layers)) and self.dense_width is None:
            raise ValueError("model.dense_layers or model.moe_every makes some layers dense: set model.dense_width")
        if not any(self.is_moe_layer(layer) for layer in range(self.num_layers)):
            raise ValueError("model.dense_layers and model.moe_every leave no layer with experts")

    def is_moe_layer(self, layer: int) -> bool:
        """Say whether layer ``layer`` (from 0) has routed experts."""
        return layer not in self.dense_layers and (layer + 1) % self.moe_every == 0
