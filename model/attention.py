"""Causal grouped-query attention with optional RMSNorm of queries and keys.

The attention itself is one call, ``F.scaled_dot_product_attention``; positions come in as rotary tables (rope.py).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from model.config import AttentionConfig, QKNorm
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

    def forward(self, x_BSD: Tensor, tables: RotaryTables) -> Tensor:
        """Return the attention's contribution to the residual stream, (B, S, D).

        Source: the order projection, norm, clip, rotation is that of transformers 5, models/olmoe/modeling_olmoe.py;
        OLMoE's own training code clips before the norm.
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
        attended_BHSA = F.scaled_dot_product_attention(
            rotate(query_BSHA.transpose(1, 2), tables),
            rotate(key_BSGA.transpose(1, 2), tables),
            value_BSGA.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.config.num_kv_heads != self.config.num_heads,
        )
        return self.o_proj(attended_BHSA.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width))
