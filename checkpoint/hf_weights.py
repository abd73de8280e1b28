"""The weights of an export, streamed: one of our tensors at a time from the checkpoint into safetensors shards.

At most one of our tensors, its cast and one shard are in memory. Names are in hf_names.py; what else an export holds
is in export_hf.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.folders import write_json
from checkpoint.hf_names import VOCABULARY_NAMES, to_hf
from checkpoint.store import TENSORS
from checkpoint.tensors import Entry, read_weights, saved_weights
from model.config import ModelConfig
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, resolve_backend

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class WeightsLayout:
    """How the weights are written."""

    dtype: torch.dtype
    vocab_size: int  # rows of the embedding and the head that are kept
    shard_bytes: int  # a file holds at most this much, or a single tensor
    untie_head: bool  # write the embedding a second time, as the head


def write_weights(checkpoint: Path, config: ModelConfig, folder: Path, layout: WeightsLayout) -> int:
    """Write the weights of a checkpoint into ``folder`` as safetensors with Hugging Face's names; return their bytes.

    Raises: ValueError when the checkpoint is not one of ``config``, or a weight is not finite in the written dtype.
    """
    entries = saved_weights(checkpoint / TENSORS)
    _check_entries(checkpoint, entries, config)
    sizes = [
        (hf_name, tensor.nbytes)
        for name, entry in entries.items()
        for hf_name, tensor in _exported(name, torch.empty(entry.shape or (), device="meta"), config, layout)
    ]
    shard_of = _assign_shards(sizes, layout.shard_bytes)
    num_shards = max(shard_of.values()) + 1
    files = [_shard_name(shard, num_shards) for shard in range(num_shards)]
    shard: dict[str, Tensor] = {}
    current = 0
    for name in entries:
        weight = read_weights(checkpoint / TENSORS, [name])[name]
        for hf_name, tensor in _exported(name, weight, config, layout):
            _check_finite(name, hf_name, tensor, weight, layout.dtype)
            if shard_of[hf_name] != current:
                _save_shard(folder / files[current], shard)
                shard, current = {}, shard_of[hf_name]
            shard[hf_name] = tensor.clone()
    _save_shard(folder / files[current], shard)
    total_bytes = sum(size_bytes for _, size_bytes in sizes)
    if num_shards > 1:
        weight_map = {hf_name: files[index] for hf_name, index in sorted(shard_of.items())}
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return total_bytes


def decoder_entries(config: ModelConfig) -> dict[str, Entry]:
    """Return the shape and dtype of every parameter and saved buffer of the fp32 decoder that ``config`` describes."""
    return {
        name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in meta_decoder(config).state_dict().items()
    }


def meta_decoder(config: ModelConfig) -> Decoder:
    """Return the decoder that ``config`` describes without memory for its weights, on the reference backend."""
    problem = moe_problem(config, tokens=1, dtype=torch.float32, device=torch.device("cpu"))
    with torch.device("meta"):
        return Decoder(config, backend=resolve_backend(BackendName.reference, problem))


def _exported(name: str, weight: Tensor, config: ModelConfig, layout: WeightsLayout) -> Iterator[tuple[str, Tensor]]:
    if name in VOCABULARY_NAMES:
        weight = weight[: layout.vocab_size]
    weight = weight.to(layout.dtype)
    yield from to_hf(name, weight, config.attention)
    if layout.untie_head and name == "embed.weight":
        yield from to_hf("lm_head.weight", weight, config.attention)


def _check_entries(checkpoint: Path, entries: dict[str, Entry], config: ModelConfig) -> None:
    wanted = {name: entry.shape for name, entry in decoder_entries(config).items()}
    found = {name: entry.shape for name, entry in entries.items()}
    different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{checkpoint} does not hold the model of config.yaml: {len(different)} tensors differ, first {name} "
            f"(config.yaml: {wanted.get(name)}, checkpoint: {found.get(name)})"
        )


def _check_finite(name: str, hf_name: str, tensor: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    if torch.isfinite(tensor).all():
        return
    if torch.isfinite(weight).all():
        raise ValueError(
            f"{name} ({hf_name}) holds ±{weight.abs().max().item():.3g}, which overflows {dtype}: "
            "export with --dtype bfloat16 or float32"
        )
    raise ValueError(f"{name} ({hf_name}) holds NaN or infinity: this checkpoint cannot be used")


def _save_shard(path: Path, shard: dict[str, Tensor]) -> None:
    # safetensors makes files that their owner alone can read; an empty file made first tells the usual permissions.
    path.touch()
    mode = path.stat().st_mode
    save_file(shard, path, metadata={"format": "pt"})
    path.chmod(mode)


def _assign_shards(sizes: list[tuple[str, int]], shard_bytes: int) -> dict[str, int]:
    shard_of: dict[str, int] = {}
    shard, used_bytes = 0, 0
    for hf_name, size_bytes in sizes:
        if used_bytes > 0 and used_bytes + size_bytes > shard_bytes:
            shard, used_bytes = shard + 1, 0
        shard_of[hf_name] = shard
        used_bytes += size_bytes
    return shard_of


def _shard_name(shard: int, num_shards: int) -> str:
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
