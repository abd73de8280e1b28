"""Keys and values of the positions that a decoder has seen, so that the next token costs one position and not all.

A cache is a value: ``Decoder.forward`` takes one and returns a longer one in ``DecoderOutput.cache``, and neither the
model nor the cache that was given changes. Two continuations may start from the same cache. Sampling with it is
evaluation/generate.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig


class LayerCache(NamedTuple):
    """One layer's keys, normalised, clipped and rotated as attention uses them, and values."""

    key_BGSA: Tensor
    value_BGSA: Tensor

    @property
    def num_positions(self) -> int:
        """How many positions are remembered."""
        return self.key_BGSA.shape[2]

    def extended(self, key_BGSA: Tensor, value_BGSA: Tensor) -> "LayerCache":
        """Return a cache of these positions followed by those given."""
        return LayerCache(torch.cat((self.key_BGSA, key_BGSA), dim=2), torch.cat((self.value_BGSA, value_BGSA), dim=2))


class KVCache(NamedTuple):
    """The caches of all layers, over the same positions of the same sequences."""

    layers: tuple[LayerCache, ...]

    @property
    def num_sequences(self) -> int:
        """How many sequences are remembered (B)."""
        return self.layers[0].key_BGSA.shape[0]

    @property
    def num_positions(self) -> int:
        """How many positions of each sequence are remembered."""
        return self.layers[0].num_positions


def empty_kv_cache(
    config: ModelConfig, *, num_sequences: int, dtype: torch.dtype, device: torch.device | str
) -> KVCache:
    """Return the cache of ``num_sequences`` sequences of which nothing was seen yet, in the model's dtype."""
    attention = config.attention
    nothing_BGSA = torch.empty(
        num_sequences, attention.num_kv_heads, 0, attention.head_width, dtype=dtype, device=device
    )
    return KVCache(tuple(LayerCache(nothing_BGSA, nothing_BGSA) for _ in range(config.num_layers)))
