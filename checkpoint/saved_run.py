"""One checkpoint of a run folder with what an export needs beside tensors: model config, tokenizer, held-out losses.

``<run>/{config.yaml, metrics.jsonl, tokenizer/, checkpoints/}`` is written by training/run_folder.py and by
import_hf.py.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer
from torch.distributed.checkpoint.api import CheckpointException
from yaml import YAMLError  # type: ignore[import-untyped]

from checkpoint.folders import in_short, sha256_of, why_incomplete
from checkpoint.metrics import read_metrics
from checkpoint.state import TrainState
from checkpoint.store import checkpoint_of_step, latest_checkpoint, read_train_state, require_complete
from model.config import ModelConfig

CONFIG = "config.yaml"
DATA = "data.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class SavedTokenizer:
    """The tokenizer of a run: which rows of the embedding mean something, and which of them ends a text."""

    folder: Path
    vocab_size: int  # one more than the largest id
    eos_id: int

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token."""
        vocabulary: dict[str, int] = self._load().get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens around it."""
        ids: list[int] = self._load().encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        text: str = self._load().decode(ids, skip_special_tokens=False)
        return text

    def copy_into(self, folder: Path) -> None:
        """Copy the tokenizer's files into ``folder``, in the spelling that transformers 4 and 5 both read."""
        for path in self.folder.iterdir():
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        path = folder / _TOKENIZER_CONFIG
        values = json.loads(path.read_text(encoding="utf-8"))
        # transformers 5 calls this class by a name that transformers 4 does not know; both know the older one.
        if values.get("tokenizer_class", "TokenizersBackend") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _load(self) -> Tokenizer:
        return load_tokenizer(self.folder / _TOKENIZER_FILE)


class HeldOutLosses(NamedTuple):
    """What one evaluation of a run logged."""

    step: int
    values: dict[str, float]  # the metrics ``eval/held_out/...``


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """One checkpoint of a run."""

    path: Path
    checkpoint: Path
    values: dict[str, Any]  # config.yaml
    config: ModelConfig
    state: TrainState
    tokenizer: SavedTokenizer

    def held_out_losses(self) -> HeldOutLosses | None:
        """Return the run's last evaluation up to this checkpoint's step, or None where none was logged.

        Steps that were lost when a process ended, and done again, are left out.
        Raises: ValueError that names the line of metrics.jsonl which cannot be read.
        """
        metrics = self.path / METRICS
        if not metrics.is_file():
            return None
        evaluated = [line for line in read_metrics(metrics) if "eval/held_out/ce_top_k" in line]
        upto = [line for line in evaluated if line["progress/step"] <= self.state.step]
        if not upto:
            return None
        values = {key: value for key, value in upto[-1].items() if key.startswith("eval/held_out/")}
        return HeldOutLosses(step=int(upto[-1]["progress/step"]), values=values)


def open_saved_run(path: Path | str, *, step: int | None = None) -> SavedRun:
    """Return the checkpoint of ``step``, or the newest complete one, of the run in folder ``path``.

    Raises: ValueError when the run's files or a complete checkpoint are missing or damaged, the tokenizer has more
    tokens than the model has embeddings, or it is not the one that the run's data was made with.
    """
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} is not a run: it has no {CONFIG}")
    values, config = _read_config(path / CONFIG)
    _check_tokenizer(path / DATA, path / TOKENIZER / _TOKENIZER_FILE)
    tokenizer = open_tokenizer(path / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens, "
            f"but model.vocab_size={config.vocab_size}: this is not the tokenizer that the model was trained with"
        )
    checkpoint = _find_checkpoint(path / CHECKPOINTS, step)
    return SavedRun(
        path=path,
        checkpoint=checkpoint,
        values=values,
        config=config,
        state=read_train_state(checkpoint),
        tokenizer=tokenizer,
    )


@contextmanager
def reading(run: SavedRun) -> Iterator[None]:
    """Say so, as a ValueError, if the run removes its checkpoint while the body reads it; other errors pass."""
    try:
        yield
    except (OSError, ValueError, CheckpointException) as error:
        reason = why_incomplete(run.checkpoint) if run.checkpoint.is_dir() else "it was removed"
        if reason is None:
            raise
        raise ValueError(
            f"{run.checkpoint} cannot be read any more: {reason}. A run that goes on keeps its newest checkpoints "
            "alone: read a newer one, or raise checkpoint.keep"
        ) from error


def model_config(values: dict[str, Any]) -> ModelConfig:
    """Return the ModelConfig of the section ``model`` of a config.yaml.

    Raises: omegaconf's errors, which name the key, for one that is unknown, missing or of another type.
    """
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), values)
    assert isinstance(merged, DictConfig)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return config


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json. Raises: ValueError that names it when it cannot be read."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises Exception itself, so nothing narrower can be named; what is narrower is not its.
        if type(error) is not Exception:
            raise
        raise ValueError(f"{path} is damaged, or no tokenizer of the tokenizers library: {error}") from error


def open_tokenizer(folder: Path) -> SavedTokenizer:
    """Return the tokenizer in ``folder``. Raises: ValueError when a file is missing or it has no end-of-text token."""
    for name in (_TOKENIZER_FILE, _TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}: an export needs the tokenizer that the model was trained with")
    try:
        eos = json.loads((folder / _TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("eos_token")
        eos_token = eos["content"] if isinstance(eos, dict) else eos
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{folder / _TOKENIZER_CONFIG} is damaged: {in_short(error)}") from error
    vocabulary = load_tokenizer(folder / _TOKENIZER_FILE).get_vocab(with_added_tokens=True)
    if eos_token not in vocabulary:
        raise ValueError(f"{folder / _TOKENIZER_CONFIG}: eos_token={eos_token!r} is not in the tokenizer's vocabulary")
    return SavedTokenizer(folder=folder, vocab_size=max(vocabulary.values()) + 1, eos_id=vocabulary[eos_token])


def _read_config(path: Path) -> tuple[dict[str, Any], ModelConfig]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(values, dict) or "model" not in values:
            raise ValueError("it has no section `model`")
        config = model_config(values["model"])
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is damaged or of another version: {error}") from error
    return {str(key): value for key, value in values.items()}, config


def _check_tokenizer(data: Path, tokenizer: Path) -> None:
    # An import has no data.json. Every source of a mixture was made with the same tokenizer.
    if not (data.is_file() and tokenizer.is_file()):
        return
    try:
        wanted = json.loads(data.read_bytes())[0]["tokenizer_sha256"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{data} is damaged, it must hold a list of manifests: {in_short(error)}") from error
    found = sha256_of(tokenizer)
    if found != wanted:
        raise ValueError(
            f"{tokenizer} is not the tokenizer that the model was trained with: its sha256 is {found[:16]}…, but "
            f"{data} has {wanted!s:.16}…. Copy back the tokenizer folder of the prepared data"
        )


def _find_checkpoint(folder: Path, step: int | None) -> Path:
    if step is not None:
        return require_complete(checkpoint_of_step(folder, step))
    found = latest_checkpoint(folder)
    if found is None:
        raise ValueError(f"{folder} holds no complete checkpoint")
    return found
