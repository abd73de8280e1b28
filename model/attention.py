"""Causal grouped-query attention with optional RMSNorm of queries and keys.

The attention itself is one call (attend.py); positions come in as rotary tables (rope.py), what was seen before as a
cache (kv_cache.py), and what may be seen as a mask (documents.py).
"""

from torch import Tensor, nn

from model.attend import AttentionKernel, attend
from model.config import AttentionConfig, QKNorm
from model.documents import DocumentMask
from model.kv_cache import LayerCache
from model.norm import RMSNorm
from model.rope import RotaryTables, rotate


class Attention(nn.Module):
    """H query heads that share G key/value heads, each of width A; H·A need not equal the model's width."""

    def __init__(self, config: AttentionConfig, *, width: int, norm_eps: float, kernel: AttentionKernel) -> None:
        super().__init__()
        self.config = config
        self.kernel = kernel
        query_width, key_width = config.query_width, config.key_width
        # One product: a step of a narrow model is limited by how many its host can launch.
        self.qkv_proj = nn.Linear(width, sum(config.qkv_widths), bias=config.bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.bias)
        if config.qk_norm is QKNorm.full_width:
            self.q_norm = RMSNorm(query_width, eps=norm_eps)
            self.k_norm = RMSNorm(key_width, eps=norm_eps)
        elif config.qk_norm is QKNorm.per_head:
            self.q_norm = RMSNorm(config.head_width, eps=norm_eps)
            self.k_norm = RMSNorm(config.head_width, eps=norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        tables: RotaryTables,
        cache: LayerCache | None = None,
        mask: DocumentMask | None = None,
    ) -> tuple[Tensor, LayerCache | None]:
        """Return the attention's contribution to the residual stream, (B, S, D), and the extended cache.

        Without a cache none is kept. The positions of ``x_BSD`` follow those in the cache. Without a mask every token
        sees all before it; a mask and a cache exclude each other.

        Sources: the order projection, norm, clip, rotation is that of transformers 5.24 and 4.57,
        models/olmoe/modeling_olmoe.py, and so of every export; OLMoE's own training code clips before the norm
        (allenai/OLMo 0079490, olmo/model.py, OLMoEBlock).
        """
        query, key, value = self.qkv_proj(x_BSD).split(self.config.qkv_widths, dim=-1)
        if self.config.qk_norm is QKNorm.full_width:
            query, key = self.q_norm(query), self.k_norm(key)
        query_BSHA, key_BSGA, value_BSGA = self._heads(query), self._heads(key), self._heads(value)
        if self.config.qk_norm is QKNorm.per_head:
            query_BSHA, key_BSGA = self.q_norm(query_BSHA), self.k_norm(key_BSGA)
        if self.config.clip_qkv is not None:
            limit = self.config.clip_qkv
            query_BSHA, key_BSGA, value_BSGA = (
                heads.clamp(-limit, limit) for heads in (query_BSHA, key_BSGA, value_BSGA)
            )
        query_BHSA = rotate(query_BSHA.transpose(1, 2), tables)
        key_BGSA, value_BGSA = rotate(key_BSGA.transpose(1, 2), tables), value_BSGA.transpose(1, 2)
        if cache is not None:
            cache = cache.extended(key_BGSA, value_BGSA)
            key_BGSA, value_BGSA = cache
        attended_BHSA = attend(query_BHSA, key_BGSA, value_BGSA, mask=mask, kernel=self.kernel)
        return self.o_proj(attended_BHSA.transpose(1, 2).flatten(2)), cache

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width))
