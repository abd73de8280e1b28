"""Text → a prepared folder: tokenizer, token shards of both splits, manifest; all or nothing, and restartable.

The work goes on in ``<out>.partial`` and is renamed to ``<out>`` when whole. Command-line options are
data/prepare.py's, reading text is data/sources.py's, the files are data/writer.py's.
"""

import fcntl
import os
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.encode import Encoder, Text, training_texts, write_documents
from data.errors import DataError
from data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    FileRecord,
    Manifest,
    SourceRecord,
    read_manifest,
    record_file,
    sha256_of_file,
    verify_files,
    write_manifest,
)
from data.progress import Progress
from data.shards import Split, token_dtype
from data.sources import Source, datasets_library
from data.split import HeldOutChoice, choose_held_out
from data.tokenizer import (
    TokenizerFingerprint,
    copy_tokenizer,
    fingerprint,
    load_tokenizer,
    tokenizer_files,
    train_tokenizer,
)
from data.unigram import count_tokens, cross_entropy_of_counts, entropy_of_counts
from data.writer import FolderWriter, JournalState, read_journal

JOURNAL_NAME = "journal.json"
JOURNAL_INTERVAL_S = 10.0


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that the bytes of a prepared folder depend on, where it goes, and the command that asked for it."""

    out: Path
    sources: tuple[Source, ...]
    text_field: str
    vocab_size: int | None  # None when a tokenizer is given
    tokenizer: Path | None
    eos_token: str | None
    tokenizer_text_mb: int  # text of the training split to learn the tokenizer from, at most
    held_out_fraction: float
    seed: int
    skip_empty: bool
    shard_tokens: int
    command: str

    def text(self) -> Text:
        """Return the documents to prepare."""
        return Text(self.sources, text_field=self.text_field, skip_empty=self.skip_empty)

    def identity(self) -> dict[str, Any]:
        """Return JSON values that are equal for two settings when they give the same bytes."""
        given = {} if self.tokenizer is None else tokenizer_files(self.tokenizer)
        return {
            "format_version": FORMAT_VERSION,
            "sources": [source.identity() for source in self.sources],
            "text_field": self.text_field,
            "vocab_size": self.vocab_size,
            "tokenizer_files": {name: sha256_of_file(path) for name, path in given.items()},
            "eos_token": self.eos_token,
            "tokenizer_text_mb": self.tokenizer_text_mb if self.tokenizer is None else None,
            "held_out_fraction": self.held_out_fraction,
            "seed": self.seed,
            "skip_empty": self.skip_empty,
            "shard_tokens": self.shard_tokens,
        }


def prepare(
    settings: PrepareSettings, progress: Progress, *, journal_interval_s: float = JOURNAL_INTERVAL_S
) -> tuple[Manifest, bool]:
    """Return the manifest of the folder ``settings.out``, and whether it had to be written.

    Raises:
        DataError: if the text can't be used, or the folder holds something else.
    """
    identity = settings.identity()
    found = _find_prepared(settings.out, identity, progress)
    if found is not None:
        return found, False
    datasets_library()
    held_out = _held_out(settings, progress)
    out = settings.out.absolute()  # a relative "." has no name
    partial = out.with_name(out.name + ".partial")
    with _sole_owner(partial), _left_only_to_go_on(partial):
        folder = partial / "folder"
        state = read_journal(partial / JOURNAL_NAME)
        if state is None or state.identity != identity:
            shutil.rmtree(folder, ignore_errors=True)
            (partial / JOURNAL_NAME).unlink(missing_ok=True)
            state = JournalState(identity=identity, documents_read=[0] * len(settings.sources))
            _make_tokenizer(settings, held_out, folder / TOKENIZER_FOLDER, progress)
        else:
            progress.say(f"going on after {sum(state.documents_read):,} documents found in {partial}")
        tokens = fingerprint(folder / TOKENIZER_FOLDER)
        if settings.vocab_size is not None and tokens.vocab_size < settings.vocab_size:
            progress.say(f"the text gives a vocabulary of {tokens.vocab_size:,} tokens only")
        writer = FolderWriter(
            folder,
            partial / JOURNAL_NAME,
            state,
            dtype=token_dtype(tokens.vocab_size),
            max_shard_tokens=settings.shard_tokens,
        )
        writer.save_journal()  # a tokenizer takes long to train on much text, so it is kept from now on
        encoder = Encoder(
            tokenizer=load_tokenizer(folder / TOKENIZER_FOLDER),
            eos_id=tokens.eos_id,
            dtype=writer.dtype,
            held_out=held_out,
        )
        write_documents(settings.text(), encoder, writer, progress, journal_interval_s=journal_interval_s)
        manifest = _finish(settings, folder, writer, tokens)
        if out.exists():  # empty, or damaged data of the same settings: _find_prepared refused all else
            shutil.rmtree(out)
        folder.rename(out)
        shutil.rmtree(partial)
    return manifest, True


def _find_prepared(out: Path, identity: dict[str, Any], progress: Progress) -> Manifest | None:
    if not out.exists():
        return None
    if not out.is_dir():
        raise DataError(f"--out {out} is a file; a folder is needed")
    if not any(out.iterdir()):
        return None
    if not (out / MANIFEST_NAME).is_file():
        raise DataError(f"--out {out} holds files but no {MANIFEST_NAME}: choose another folder, or empty this one")
    try:
        manifest = read_manifest(out)
    except DataError as error:
        raise DataError(f"{error}. Remove {out} or choose another folder with --out") from error
    if manifest.settings != identity:
        raise DataError(
            f"--out {out} already holds data prepared with other settings "
            f"({_differences(manifest.settings, identity)}): remove it or choose another folder"
        )
    try:
        verify_files(out, manifest)
    except DataError as error:
        progress.say(f"{error}. Preparing {out} again")
        return None
    return manifest


def _differences(there: dict[str, Any], wanted: dict[str, Any]) -> str:
    return "; ".join(
        "other text" if key == "sources" else f"{key} {there.get(key)} there, {value} now"
        for key, value in wanted.items()
        if there.get(key) != value
    )


@contextmanager
def _sole_owner(partial: Path) -> Iterator[None]:
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another data.prepare is at work in {partial}") from error
        yield


@contextmanager
def _left_only_to_go_on(partial: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        state = read_journal(partial / JOURNAL_NAME)
        if state is None or sum(state.documents_read) == 0:
            shutil.rmtree(partial)
        raise


def _held_out(settings: PrepareSettings, progress: Progress) -> Container[int]:
    filled = (document.index for document in settings.text().documents() if document.text.strip())
    held_out = choose_held_out(filled, settings.held_out_fraction, settings.seed)
    if not isinstance(held_out, HeldOutChoice):
        progress.say(f"too few documents for --held-out-fraction {settings.held_out_fraction}: one of them is held out")
    return held_out


def _make_tokenizer(settings: PrepareSettings, held_out: Container[int], folder: Path, progress: Progress) -> None:
    if settings.tokenizer is not None:
        copy_tokenizer(settings.tokenizer, folder, settings.eos_token)
        return
    assert settings.vocab_size is not None
    progress.say(f"training a byte-level BPE tokenizer of {settings.vocab_size:,} tokens on the training split")
    texts = training_texts(settings.text(), held_out, max_bytes=settings.tokenizer_text_mb * 10**6)
    train_tokenizer(texts, settings.vocab_size, folder)


def _finish(settings: PrepareSettings, folder: Path, writer: FolderWriter, tokens: TokenizerFingerprint) -> Manifest:
    """Return the manifest, written into the folder as its last file."""
    train, held_out = writer.split_record("train"), writer.split_record("held_out")
    dtype = token_dtype(tokens.vocab_size)
    train_V, held_out_V = (
        count_tokens(Split(folder, record, dtype).tokens, tokens.vocab_size) for record in (train, held_out)
    )
    sources = zip(settings.sources, writer.state.identity["sources"], writer.state.documents_read, strict=True)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        token_dtype=dtype,
        vocab_size=tokens.vocab_size,
        eos_id=tokens.eos_id,
        tokenizer_sha256=tokens.sha256,
        train=train,
        held_out=held_out,
        unigram_ce_train_fit=cross_entropy_of_counts(held_out_V, train_V),
        unigram_entropy_held_out=entropy_of_counts(held_out_V),
        sources=tuple(
            SourceRecord(source.name, documents, identity.get("bytes"), identity.get("sha256"))
            for source, identity, documents in sources
        ),
        documents_skipped_empty=writer.state.documents_skipped_empty,
        settings=writer.state.identity,
        command=settings.command,
        files=_record_files(folder),
    )
    write_manifest(folder, manifest)
    for path in (folder / MANIFEST_NAME, *(folder / name for name in manifest.files)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return manifest


def _record_files(folder: Path) -> dict[str, FileRecord]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {path.relative_to(folder).as_posix(): record_file(path) for path in paths}
