"""Small runs with random weights, and exports of them: python tests/checkpoint/make_exports.py FOLDER.

The exports are what tests/checkpoint/hf4/ reads in an environment with transformers 4. The tests beside this file
build their runs with ``write_run``.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

PROJECT_ROOT = Path(__file__).resolve().parents[2]
if str(PROJECT_ROOT) not in sys.path:
    sys.path.insert(0, str(PROJECT_ROOT))

from omegaconf import OmegaConf  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from checkpoint.export_hf import ExportOptions, export  # noqa: E402
from checkpoint.hf_weights import meta_decoder  # noqa: E402
from checkpoint.reference import TEXT, make_reference  # noqa: E402
from checkpoint.saved_run import model_config, open_saved_run  # noqa: E402
from checkpoint.state import TrainState  # noqa: E402
from checkpoint.store import TENSORS, save_weights  # noqa: E402
from checkpoint.tensors import read_weights, saved_weights  # noqa: E402
from checkpoint.verify_hf import REFERENCE, verify  # noqa: E402
from data.tokenizer import train_tokenizer  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.decoder import Decoder  # noqa: E402

VOCAB_SIZE = 320  # of the tokenizer; the models have 352 rows, as padded vocabularies do
OLMOE: dict[str, Any] = {
    "vocab_size": 352,
    "width": 48,
    "num_layers": 2,
    "max_positions": 64,
    "attention": {
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_width": 12,
        "qk_norm": "full_width",
        "rope_theta": 500.0,
    },
    "moe": {"num_experts": 6, "experts_per_token": 2, "expert_width": 16},
}
QWEN3: dict[str, Any] = {
    "vocab_size": 352,
    "width": 48,
    "num_layers": 3,
    "max_positions": 64,
    "norm_eps": 1e-6,
    "attention": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_width": 16,
        "qk_norm": "per_head",
        "rope_theta": 1_000_000.0,
    },
    "moe": {"num_experts": 6, "experts_per_token": 2, "expert_width": 16, "normalize_top_k": True},
}

# Every setting that a class can express is off its default in some export. A name is a folder.
EXPORTS: dict[str, tuple[dict[str, Any], dict[str, Any], ExportOptions]] = {
    "olmoe": (OLMOE, {}, ExportOptions()),
    "olmoe_bfloat16": (OLMOE, {}, ExportOptions(dtype_name="bfloat16")),
    "olmoe_all": (
        OLMOE,
        {
            "attention": {"num_kv_heads": 2, "bias": True, "clip_qkv": 0.5},
            "moe": {"normalize_top_k": True},
            "norm_eps": 1e-4,
            "tie_embeddings": True,
        },
        ExportOptions(serve=(), shard_bytes=60_000),
    ),
    "qwen3_moe": (QWEN3, {}, ExportOptions()),
    "qwen3_moe_float16": (QWEN3, {}, ExportOptions(dtype_name="float16")),
    "qwen3_moe_all": (
        QWEN3,
        {
            "attention": {"bias": True},
            "moe": {"normalize_top_k": False},
            "dense_layers": [1],
            "dense_width": 40,
            "tie_embeddings": True,
        },
        ExportOptions(serve=(), shard_bytes=60_000),
    ),
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = changed(base.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """Return a decoder whose every weight is random and large enough that a wrong one shows in the logits."""
    decoder = meta_decoder(config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return decoder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer of exactly ``vocab_size`` tokens into ``folder``."""
    train_tokenizer([TEXT], vocab_size, folder)


def write_run(folder: Path, values: dict[str, Any], *, seed: int = 0, step: int = 7) -> Path:
    """Write the folder of a run whose model has random weights: config, tokenizer, metrics and one checkpoint."""
    config = model_config(values)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer")
    run_values = {
        "model": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
        "train": {"load_balance_weight": 0.01},
    }
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(run_values))
    lines = [
        {"progress/step": step, "eval/held_out/ce_top_k": 4.25, "eval/held_out/ce_train_routing": 4.5},
        {"progress/step": step + 1, "eval/held_out/ce_top_k": 1.0, "eval/held_out/ce_train_routing": 1.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_weights(
        folder / "checkpoints",
        weights=random_decoder(config, seed).state_dict(),
        state=TrainState(step=step, tokens=1000 * step, samples=step, wandb_id=None),
        config=run_values,
    )
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change some values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's newest checkpoint."""
    checkpoint = open_saved_run(run).checkpoint
    return read_weights(checkpoint / TENSORS, saved_weights(checkpoint / TENSORS))


def exported_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an export."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def verified(run: Path, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the report on an export, made in this process: the same check without the time of imports."""
    reference = make_reference(open_saved_run(run), dtype=dtype, device=torch.device("cpu"))
    reference.save(folder / REFERENCE)
    return verify(folder, folder / REFERENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="gets a folder runs/ and one folder for each export")
    folder = parser.parse_args().folder
    for name, (base, changes, options) in EXPORTS.items():
        run = write_run(folder / "runs" / name, changed(base, changes))
        receipt = export(run, folder / name, options=options)
        print(name, {dtype: logits["norm_wise_error"] for dtype, logits in receipt["reload"]["logits"].items()})


if __name__ == "__main__":
    main()
