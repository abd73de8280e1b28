"""An OLMoE or Qwen3-MoE folder as a start for further training: python -m checkpoint.import_hf HF_FOLDER OUT.

Folders written by transformers 4 (per-expert tensors), by transformers 5 (those, or fused ones) and by export_hf.py are
read, sharded or not. ``OUT`` is laid out like a run: config.yaml, tokenizer/ and one checkpoint with weights alone.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.folders import publish
from checkpoint.hf_config import from_hf_config
from checkpoint.hf_names import from_hf, hf_sources, to_hf
from checkpoint.hf_weights import INDEX, decoder_entries
from checkpoint.saved_run import CHECKPOINTS, CONFIG, TOKENIZER, load_tokenizer
from checkpoint.state import TrainState
from checkpoint.store import save_weights
from model.config import ModelConfig

_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_FILES = (
    _TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_RECOMPUTED = "rotary_emb.inv_freq"  # old folders hold the rotary frequencies too


def import_hf(source: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the config and the weights, in our names and fp32, of a local folder or of a model on the Hub.

    The fields that say how the model is trained (``moe.routing``) keep their defaults.
    Raises: ValueError for another kind of model, or tensors that are missing, unexpected or of the wrong shape.
    """
    folder = local_folder(source)
    config = from_hf_config(folder)
    files = weight_files(folder)
    open_files = {name: safe_open(folder / name, framework="pt") for name in set(files.values())}

    def read(name: str) -> Tensor:
        tensor: Tensor = open_files[files[name]].get_tensor(name)
        return tensor.to(torch.float32)

    weights: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, entry in decoder_entries(config).items():
        sources = hf_sources(name, num_experts=config.moe.num_experts, available=files.keys())
        missing = [hf_name for hf_name in sources if hf_name not in files]
        if missing:
            raise ValueError(f"{folder} has no {missing[0]}, which {name} is made of ({len(missing)} are missing)")
        assert entry.shape is not None
        ours = torch.empty(entry.shape, device="meta")
        parts = {part: tuple(view.shape) for part, view in to_hf(name, ours, config.attention)}
        for hf_name in sources:
            found = tuple(open_files[files[hf_name]].get_slice(hf_name).get_shape())
            wanted = parts.get(hf_name, entry.shape)  # a fused tensor has the shape of ours
            if found != wanted:
                raise ValueError(f"{hf_name} in {folder} has shape {found}, but its config.json needs {wanted}")
        weights[name] = from_hf(name, sources, read)
        used.update(sources)
    _check_unused(folder, {name for name in files.keys() - used if not name.endswith(_RECOMPUTED)}, config, read)
    return config, weights


def write_import(source: Path | str, out: Path | str) -> Path:
    """Write what ``import_hf`` returns to ``out`` in the layout of a run, and return the checkpoint's path.

    ``checkpoint.store.load_weights`` reads the checkpoint, and ``checkpoint.export_hf`` takes the folder as a run.
    Raises: ValueError when ``out`` is there already or the tokenizer is damaged, and as ``import_hf`` does.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    for path in (out, partial):
        if path.exists():
            raise ValueError(f"{path} exists: name another folder, or remove it")
    folder = local_folder(source)
    if (folder / _TOKENIZER_FILE).is_file():
        load_tokenizer(folder / _TOKENIZER_FILE)
    config, weights = import_hf(source)
    (partial / TOKENIZER).mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, partial / TOKENIZER / name)
    values = {"model": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)}
    (partial / CONFIG).write_text(OmegaConf.to_yaml(values), encoding="utf-8")
    state = TrainState(step=0, tokens=0, samples=0, wandb_id=None)
    checkpoint = save_weights(partial / CHECKPOINTS, weights=weights, state=state, config=values)
    publish(partial, out)
    return out / CHECKPOINTS / checkpoint.name


def local_folder(source: Path | str) -> Path:
    """Return ``source`` if it is a folder, else the folder that the Hub's model of that name was downloaded to."""
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, Path) or source.count("/") != 1 or source.startswith((".", "/")):
        raise ValueError(f"{source} is neither a folder nor a name on the Hub like allenai/OLMoE-1B-7B-0924")
    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))


def weight_files(folder: Path) -> dict[str, str]:
    """Return the safetensors file of every tensor in a Hugging Face folder.

    Raises: ValueError when there are no safetensors weights, or the index names a file that is not there.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{folder} has neither {INDEX} nor model.safetensors")
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), single.name)
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise ValueError(f"{index} names {absent[0]}, which is not there ({len(absent)} files are missing)")
    return weight_map


def _check_unused(folder: Path, unused: set[str], config: ModelConfig, read: Callable[[str], Tensor]) -> None:
    if config.tie_embeddings and "lm_head.weight" in unused:
        if not torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding: "
                "set it to false in config.json to keep both"
            )
        unused = unused - {"lm_head.weight"}
    if unused:
        raise ValueError(f"{folder} has {len(unused)} tensors that our decoder has no place for, first {min(unused)}")


def main(arguments: list[str] | None = None) -> int:
    """Import one folder, print where its checkpoint is, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint.import_hf", description=__doc__.split("\n")[0])
    parser.add_argument("source", help="a folder, or a name on the Hub")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parsed = parser.parse_args(arguments)
    try:
        checkpoint = write_import(parsed.source, parsed.out)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"imported {parsed.source}: weights in {checkpoint}, model in {parsed.out / CONFIG}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
