"""One decoder layer: attention, then experts or a dense MLP, each on a normalised copy and added to the stream."""

from torch import Tensor, nn

from model.attend import AttentionKernel
from model.attention import Attention
from model.config import ModelConfig
from model.documents import DocumentMask
from model.kv_cache import LayerCache
from model.mlp import DenseMLP
from model.moe import MoE, MoEStats
from model.norm import RMSNorm
from model.rope import RotaryTables
from moe_kernels import Backend, RoutingKind


class DecoderBlock(nn.Module):
    """Layer ``layer`` (from 0) of a decoder; it has either ``moe`` or ``mlp``."""

    moe: MoE | None
    mlp: DenseMLP | None

    def __init__(
        self, config: ModelConfig, *, layer: int, backend: Backend, attention: AttentionKernel, recompute_h: bool
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config.attention, width=config.width, norm_eps=config.norm_eps, kernel=attention)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.moe, self.mlp = None, None
        if config.is_moe_layer(layer):
            self.moe = MoE(config.moe, width=config.width, backend=backend, recompute_h=recompute_h)
        else:
            assert config.dense_width is not None  # ModelConfig refuses dense layers without a width
            self.mlp = DenseMLP(config.width, hidden_width=config.dense_width)

    def forward(
        self,
        x_BSD: Tensor,
        tables: RotaryTables,
        *,
        routing: RoutingKind,
        seed: int | Tensor | None,
        cache: LayerCache | None = None,
        mask: DocumentMask | None = None,
    ) -> tuple[Tensor, MoEStats | None, LayerCache | None]:
        """Return the stream after this layer, what its router did if it has one, and the extended cache if one came."""
        attended_BSD, cache = self.attention(self.attention_norm(x_BSD), tables, cache, mask)
        x_BSD = x_BSD + attended_BSD
        normalised_BSD = self.mlp_norm(x_BSD)
        if self.moe is None:
            assert self.mlp is not None
            return x_BSD + self.mlp(normalised_BSD), None, cache
        out_BSD, stats = self.moe(normalised_BSD, routing=routing, seed=seed)
        return x_BSD + out_BSD, stats, cache
