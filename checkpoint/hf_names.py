"""Our parameter names and those of Hugging Face's OLMoE and Qwen3-MoE, in both directions.

The two families share their names; only Qwen3-MoE has dense layers. We hold the projections of queries, keys and values
as one matrix, their rows in this order, and a layer's experts fused, ``w_gate_up``
(E, 2N, D) with gate rows first and ``w_down`` (E, D, N). Files of transformers 4, and those that we write, hold them
per expert; transformers 5 can write them fused in our own layout. What the classes cannot express is in hf_rules.py.
"""

from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor

from model.config import AttentionConfig

_OUTSIDE_BLOCKS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    **{f"attention.o_proj.{kind}": f"self_attn.o_proj.{kind}" for kind in ("weight", "bias")},
    **{f"mlp.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "moe.router.weight": "mlp.gate.weight",
}
_QKV = {f"attention.qkv_proj.{kind}": kind for kind in ("weight", "bias")}
_FUSED = {"moe.w_gate_up": "mlp.experts.gate_up_proj", "moe.w_down": "mlp.experts.down_proj"}

VOCABULARY_NAMES = ("embed.weight", "lm_head.weight")  # their rows are token ids


def to_hf(name: str, tensor: Tensor, attention: AttentionConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face names and tensors, views of ``tensor``, that our parameter ``name`` becomes.

    Raises: ValueError for a name that neither family has.
    """
    prefix, in_block = _split(name)
    if in_block == "moe.w_gate_up":
        N = tensor.shape[1] // 2
        for expert, gate_up_2ND in enumerate(tensor):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", gate_up_2ND[:N]
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", gate_up_2ND[N:]
    elif in_block == "moe.w_down":
        for expert, down_DN in enumerate(tensor):
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", down_DN
    elif in_block in _QKV:
        yield from zip(_qkv_names(prefix, in_block), tensor.split(attention.qkv_widths), strict=True)
    else:
        yield _plain_name(name), tensor


def hf_sources(name: str, *, num_experts: int, available: Set[str]) -> list[str]:
    """Return the Hugging Face tensors that our parameter ``name`` is made of, in the order that ``from_hf`` takes them.

    The fused spelling is chosen where ``available`` has it, else one or two names per expert.
    Raises: ValueError for a name that neither family has.
    """
    prefix, in_block = _split(name)
    if in_block in _QKV:
        return _qkv_names(prefix, in_block)
    if in_block not in _FUSED:
        return [_plain_name(name)]
    fused = prefix + _FUSED[in_block]
    if fused in available:
        return [fused]
    parts = ("gate", "up") if in_block == "moe.w_gate_up" else ("down",)
    return [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(num_experts) for part in parts]


def from_hf(name: str, sources: list[str], read: Callable[[str], Tensor]) -> Tensor:
    """Return our parameter ``name``, made of the tensors ``sources`` that ``read`` returns one by one."""
    _, in_block = _split(name)
    if in_block in _QKV:
        return torch.cat([read(source) for source in sources])
    if in_block not in _FUSED or sources[0].endswith(_FUSED[in_block]):
        return read(sources[0])
    if in_block == "moe.w_down":
        return torch.stack([read(source) for source in sources])
    gates, ups = sources[::2], sources[1::2]
    return torch.stack([torch.cat((read(gate), read(up))) for gate, up in zip(gates, ups, strict=True)])


def _qkv_names(prefix: str, in_block: str) -> list[str]:
    return [f"{prefix}self_attn.{part}_proj.{_QKV[in_block]}" for part in ("q", "k", "v")]


def _split(name: str) -> tuple[str, str]:
    """Return ``("model.layers.3.", "moe.w_down")`` for ``blocks.3.moe.w_down``, and ``("", name)`` outside blocks."""
    if not name.startswith("blocks."):
        return "", name
    _, layer, in_block = name.split(".", 2)
    return f"model.layers.{layer}.", in_block


def _plain_name(name: str) -> str:
    prefix, in_block = _split(name)
    known = _IN_BLOCK if prefix else _OUTSIDE_BLOCKS
    if in_block not in known:
        raise ValueError(f"{name} has no place in OlmoeForCausalLM or Qwen3MoeForCausalLM")
    return prefix + known[in_block]
