"""The whole model: token ids in; logits, or the summed cross-entropy, and the routers' counts out.

Parameter names are a file format (checkpoints and checkpoint/hf_names.py): renaming one breaks runs on disk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attend import AttentionKernel
from model.block import DecoderBlock
from model.config import ModelConfig
from model.documents import DocumentMask, Documents, document_bias, document_blocks
from model.init import initial_value
from model.kv_cache import KVCache, LayerCache
from model.losses import chunked_cross_entropy
from model.moe import MoE, MoEStats
from model.norm import RMSNorm
from model.rope import rotary_tables
from moe_kernels import Backend, Rounding, RoutingKind
from moe_kernels.routing.counter_hash import checked_seed


class DecoderOutput(NamedTuple):
    """What a forward pass returns; ``logits_BSV`` without labels, ``ce_sum`` with them."""

    logits_BSV: Tensor | None  # in the model's dtype, as transformers gives them
    ce_sum: Tensor | None  # fp32 scalar, nats summed over labels that are not -100
    moe: MoEStats  # every field stacked over the layers with experts, (L, ...)
    cache: KVCache | None = None  # the cache that was given, longer by these positions; None where none was given


class LMHead(nn.Module):
    """The map from the stream to the vocabulary; logits and loss are both made inside ``forward``.

    Sharding gathers a module's parameters around its ``forward``, so nothing else may read ``weight`` in a step.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.width))

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return ``(logits_BSV, None)`` without labels, ``(None, ce_sum)`` with them."""
        return _vocabulary_output(x_BSD, self.weight, labels_BS)


class Decoder(nn.Module):
    """A decoder-only transformer on one device.

    Freshly built parameters hold arbitrary memory: call ``init_weights``, or load a checkpoint.
    With ``tie_embeddings`` there is no ``lm_head``: ``embed.weight`` serves both ends. With ``recompute_h`` the experts
    save less and compute more (``moe_experts``). ``attention`` is an answer of ``choose_attention``.
    """

    lm_head: LMHead | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: Backend,
        attention: AttentionKernel = AttentionKernel.sdpa,
        recompute_h: bool = False,
    ) -> None:
        super().__init__()
        if attention is AttentionKernel.auto:
            raise ValueError("attention=auto is a question: build the decoder with the answer of choose_attention")
        self.config = config
        self.attention = attention
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            DecoderBlock(config, layer=layer, backend=backend, attention=attention, recompute_h=recompute_h)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else LMHead(config)

    @torch.no_grad()
    def init_weights(self, seed: int, *, write: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        """Set every parameter and buffer to its starting value (model/init.py), drawn on the CPU from ``seed``.

        ``write(parameter, value)`` puts a whole value into its parameter; whoever sharded the model brings their own.

        Raises:
            ValueError: if parameters are on the meta device, where they have no values.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} is on the meta device: call to_empty(device=...) before init_weights")
            write(parameter, initial_value(name, parameter.shape, init_std=self.config.init_std, seed=seed))
        for moe in self.moe_layers():
            if moe.router.expert_bias is not None:
                moe.router.expert_bias.zero_()

    def moe_layers(self) -> list[MoE]:
        """Return the layers with experts, in the order of the leading dimension of ``DecoderOutput.moe``."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def forward(
        self,
        input_ids_BS: Tensor,
        labels_BS: Tensor | None = None,
        *,
        routing: RoutingKind = RoutingKind.top_k,
        seed: int | Tensor | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> DecoderOutput:
        """Return logits, or the summed cross-entropy if labels are given, and the routers' counts and sums.

        ``labels_BS`` are already shifted: the label of position s is the token at s + 1, or -100 for none.
        ``seed`` names this micro-batch for stochastic rounding; layer l uses seed · num_layers + l, which must fit in a
        signed 64-bit integer.
        ``cache`` holds what came before ``input_ids_BS`` (``empty_kv_cache`` at first) and comes back longer by them.
        ``documents`` keep attention among the tokens of each, and give the positions; without them a row is one text.
        ``train()`` and ``eval()`` change nothing: the routing is an argument.

        Raises:
            ValueError: if the ids are not (B, S), if they and the cache exceed model.max_positions, if labels or
                documents have another shape or the cache is of other sequences, or for a cache together with another
                routing than top-K or with documents.
        """
        self._check(input_ids_BS, labels_BS, routing, cache)
        if documents is not None:
            _check_documents(documents, input_ids_BS, cache)
        tables = rotary_tables(
            _positions(input_ids_BS, cache) if documents is None else documents.position_BS,
            head_width=self.config.attention.head_width,
            theta=self.config.attention.rope_theta,
        )
        x_BSD = self.embed(input_ids_BS)
        mask = None if documents is None else self._mask(documents, dtype=x_BSD.dtype)
        stats_of_layers: list[MoEStats] = []
        caches: list[LayerCache] = []
        seeds = self._layer_seeds(seed, routing, input_ids_BS.device)
        for layer, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[layer]
            x_BSD, stats, layer_cache = block(
                x_BSD, tables, routing=routing, seed=seeds[layer], cache=layer_cache, mask=mask
            )
            if stats is not None:
                stats_of_layers.append(stats)
            if layer_cache is not None:
                caches.append(layer_cache)
        x_BSD = self.norm(x_BSD)
        if self.lm_head is None:
            logits_BSV, ce_sum = _vocabulary_output(x_BSD, self.embed.weight, labels_BS)
        else:
            logits_BSV, ce_sum = self.lm_head(x_BSD, labels_BS)
        moe = MoEStats(*(torch.stack(field) for field in zip(*stats_of_layers, strict=True)))
        return DecoderOutput(logits_BSV, ce_sum, moe, None if cache is None else KVCache(tuple(caches)))

    def _layer_seeds(
        self, seed: int | Tensor | None, routing: RoutingKind, device: torch.device
    ) -> Sequence[Tensor | None]:
        """Return each layer's seed, as a tensor on ``device``: a compiled block is compiled anew for each int."""
        num_layers = self.config.num_layers
        rounding = self.config.moe.routing.rounding
        is_read = routing is RoutingKind.token_rounding and rounding is Rounding.stochastic
        if seed is None or not is_read:
            return [None] * num_layers
        if isinstance(seed, Tensor):
            return (seed.to(device, torch.int64) * num_layers + torch.arange(num_layers, device=device)).unbind()
        first = checked_seed(seed * num_layers)
        checked_seed(first + num_layers)
        return torch.arange(first, first + num_layers, device=device).unbind()

    def _mask(self, documents: Documents, *, dtype: torch.dtype) -> DocumentMask:
        if self.attention is AttentionKernel.flex:
            return document_blocks(documents)
        return document_bias(documents, dtype=dtype)

    def _check(
        self, input_ids_BS: Tensor, labels_BS: Tensor | None, routing: RoutingKind, cache: KVCache | None
    ) -> None:
        if input_ids_BS.ndim != 2 or input_ids_BS.numel() == 0:
            raise ValueError(f"input ids have shape {tuple(input_ids_BS.shape)}, expected (sequences, positions)")
        num_positions = input_ids_BS.shape[1] + (0 if cache is None else cache.num_positions)
        if num_positions > self.config.max_positions:
            raise ValueError(
                f"sequences of {num_positions} tokens exceed model.max_positions={self.config.max_positions}"
            )
        if labels_BS is not None and labels_BS.shape != input_ids_BS.shape:
            raise ValueError(f"labels have shape {tuple(labels_BS.shape)}, input ids {tuple(input_ids_BS.shape)}")
        if cache is not None:
            self._check_cache(cache, input_ids_BS, routing)

    def _check_cache(self, cache: KVCache, input_ids_BS: Tensor, routing: RoutingKind) -> None:
        if routing is not RoutingKind.top_k:
            raise ValueError(
                f"routing={routing.name} with a cache: it chooses among the tokens of a whole micro-batch, so the "
                "experts of a token would depend on what is decoded beside it; decode with routing=top_k"
            )
        if cache.num_sequences != input_ids_BS.shape[0] or len(cache.layers) != self.config.num_layers:
            raise ValueError(
                f"the cache is of {cache.num_sequences} sequences and {len(cache.layers)} layers, but "
                f"{input_ids_BS.shape[0]} sequences came to a model of {self.config.num_layers} layers"
            )


def _positions(input_ids_BS: Tensor, cache: KVCache | None) -> Tensor:
    """Return the positions (S,) of every row, after those in the cache."""
    num_past = 0 if cache is None else cache.num_positions
    return torch.arange(num_past, num_past + input_ids_BS.shape[1], device=input_ids_BS.device)


def _check_documents(documents: Documents, input_ids_BS: Tensor, cache: KVCache | None) -> None:
    for name, tensor in documents._asdict().items():
        if tensor.shape != input_ids_BS.shape:
            raise ValueError(f"documents.{name} has shape {tuple(tensor.shape)}, input ids {tuple(input_ids_BS.shape)}")
    if cache is not None:
        raise ValueError("documents with a cache: a text that is decoded is one document, so leave them out")


def _vocabulary_output(
    x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if labels_BS is None:
        return F.linear(x_BSD, weight_VD), None
    return None, chunked_cross_entropy(x_BSD.flatten(0, 1), weight_VD, labels_BS.flatten())
