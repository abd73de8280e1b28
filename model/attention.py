"""Causal grouped-query attention with optional RMSNorm of queries and keys.

The attention itself is one call, ``F.scaled_dot_product_attention``; positions come in as rotary tables (rope.py), and
what was seen before as a cache (kv_cache.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import AttentionConfig, QKNorm
from model.kv_cache import LayerCache
from model.norm import RMSNorm
from model.rope import RotaryTables, rotate


class Attention(nn.Module):
    """H query heads that share G key/value heads, each of width A; H·A need not equal the model's width."""

    def __init__(self, config: AttentionConfig, *, width: int, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        query_width = config.num_heads * config.head_width
        key_width = config.num_kv_heads * config.head_width
        self.q_proj = nn.Linear(width, query_width, bias=config.bias)
        self.k_proj = nn.Linear(width, key_width, bias=config.bias)
        self.v_proj = nn.Linear(width, key_width, bias=config.bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.bias)
        if config.qk_norm is QKNorm.full_width:
            self.q_norm = RMSNorm(query_width, eps=norm_eps)
            self.k_norm = RMSNorm(key_width, eps=norm_eps)
        elif config.qk_norm is QKNorm.per_head:
            self.q_norm = RMSNorm(config.head_width, eps=norm_eps)
            self.k_norm = RMSNorm(config.head_width, eps=norm_eps)

    def forward(
        self, x_BSD: Tensor, tables: RotaryTables, cache: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache | None]:
        """Return the attention's contribution to the residual stream, (B, S, D), and the extended cache.

        Without a cache none is kept. The positions of ``x_BSD`` follow those in the cache.

        Sources: the order projection, norm, clip, rotation is that of transformers 5.24 and 4.57,
        models/olmoe/modeling_olmoe.py, and so of every export; OLMoE's own training code clips before the norm
        (allenai/OLMo 0079490, olmo/model.py, OLMoEBlock).
        """
        query, key, value = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
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
        num_past = 0
        if cache is not None:
            num_past = cache.num_positions
            cache = cache.extended(key_BGSA, value_BGSA)
            key_BGSA, value_BGSA = cache
        attended_BHSA = F.scaled_dot_product_attention(
            query_BHSA,
            key_BGSA,
            value_BGSA,
            attn_mask=_mask_after(num_past, query_BHSA),
            is_causal=num_past == 0,
            enable_gqa=self.config.num_kv_heads != self.config.num_heads,
        )
        return self.o_proj(attended_BHSA.transpose(1, 2).flatten(2)), cache

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width))


def _mask_after(num_past: int, query_BHSA: Tensor) -> Tensor | None:
    """Return which keys each query sees when ``num_past`` positions came before; None where no mask is needed."""
    num_new = query_BHSA.shape[2]
    if num_past == 0 or num_new == 1:
        return None  # is_causal says it, or a single last position sees everything
    sees = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=query_BHSA.device)
    # is_causal aligns the mask's corner with the first key, which is wrong behind a cache.
    return sees.tril(diagonal=num_past)
