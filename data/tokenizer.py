"""The tokenizer of a prepared folder: trained or taken over, loaded, fingerprinted; always a Hugging Face folder."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data.errors import DataError
from data.manifest import sha256_of_file

EOS_TOKEN = "<|endoftext|>"
TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
OTHER_NAMES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # taken along from a given folder
MIN_VOCAB_SIZE = 257  # every byte and the end-of-text token


@dataclass(frozen=True)
class TokenizerFingerprint:
    """What must be equal for token ids to mean the same."""

    sha256: str  # of tokenizer.json
    vocab_size: int  # one more than the largest id
    eos_id: int


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, set so that text which spells a special token is encoded as ordinary text."""
    path = folder / TOKENIZER_NAME
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model"]["type"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a tokenizer of the tokenizers library: {error!r}") from error
    if not isinstance(kind, str):
        raise DataError(f"{path} is not a tokenizer of the tokenizers library: its model has the type {kind!r}")
    tokenizer = Tokenizer.from_file(str(path))
    # Without this a document that quotes <|endoftext|> would end there. The setting isn't part of tokenizer.json.
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def fingerprint(folder: Path) -> TokenizerFingerprint:
    """Return the fingerprint of the tokenizer in a folder, with the end-of-text token that its config names."""
    tokenizer = load_tokenizer(folder)
    eos_token = _token_text(_read_config(folder)["eos_token"])
    eos_id = tokenizer.token_to_id(eos_token)
    assert eos_id is not None, f"{folder} was written without checking its end-of-text token {eos_token!r}"
    return TokenizerFingerprint(
        sha256=sha256_of_file(folder / TOKENIZER_NAME),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=eos_id,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Write a byte-level BPE tokenizer learned from ``texts`` into ``folder``; its only special token ends documents.

    The vocabulary is smaller than asked when the text has too few pairs to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    folder.mkdir(parents=True)
    # Not by its own save, which raises a bare Exception where a disk is full.
    (folder / TOKENIZER_NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_config(folder, _new_config())


def tokenizer_files(given: Path) -> dict[str, Path]:
    """Return the files to take from a Hugging Face tokenizer folder, or tokenizer.json given alone, by their names.

    Raises:
        DataError: when there is no tokenizer.json.
    """
    if given.is_dir():
        found = {name: given / name for name in (TOKENIZER_NAME, CONFIG_NAME, *OTHER_NAMES) if (given / name).is_file()}
    else:
        found = {TOKENIZER_NAME: given} if given.is_file() else {}
    if TOKENIZER_NAME not in found:
        raise DataError(f"--tokenizer {given}: there is no {given if given.suffix else given / TOKENIZER_NAME}")
    return found


def copy_tokenizer(given: Path, folder: Path, eos_token: str | None) -> None:
    """Copy a tokenizer into ``folder`` as a Hugging Face folder.

    ``eos_token`` overrides the one that the given folder's tokenizer_config.json names.

    Raises:
        DataError: when there is no tokenizer, or no known token that ends documents.
    """
    folder.mkdir(parents=True)
    for name, path in tokenizer_files(given).items():
        shutil.copyfile(path, folder / name)
    config = _read_config(folder) if (folder / CONFIG_NAME).is_file() else _new_config()
    chosen = eos_token or _token_text(config.get("eos_token") or EOS_TOKEN)
    if load_tokenizer(folder).token_to_id(chosen) is None:
        raise DataError(f"--tokenizer {given}: its vocabulary has no token {chosen!r}; name the one with --eos-token")
    _write_config(folder, {**config, "eos_token": chosen})


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    return config


def _token_text(token: str | dict[str, Any]) -> str:
    """Return a special token's text, which configs hold as a string or as an object with its properties."""
    return token if isinstance(token, str) else str(token["content"])


def _new_config() -> dict[str, Any]:
    # Decoding gives back the text as it was: no space before punctuation is removed.
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN, "clean_up_tokenization_spaces": False}


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
