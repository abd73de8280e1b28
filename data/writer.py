"""Appends tokenised documents to the files of a folder, and takes the work up again after a kill.

What is in the files at any moment depends on the documents so far alone: not on the blocks that they came in, and not
on how often the work was stopped. A journal says how far the files are good; a resumed writer cuts off what is past
it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.manifest import SPLITS, ShardRecord, SplitRecord
from data.shards import INDEX_DTYPE

INDEX_BYTES = np.dtype(INDEX_DTYPE).itemsize


@dataclass(frozen=True)
class EncodedDocument:
    """One document on its way to the files."""

    index: int  # its number over all text
    held_out: bool
    text_bytes: int
    tokens: NDArray[np.unsignedinteger[Any]]  # of the folder's token type, with the end-of-text token


@dataclass
class SplitState:
    """How much of one split is written."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    shard_tokens: list[int] = field(default_factory=list)


@dataclass
class JournalState:
    """How far a preparation is; ``identity`` says of what text and with which settings."""

    identity: dict[str, Any]
    documents_read: list[int]  # of each source
    documents_skipped_empty: int = 0
    splits: dict[str, SplitState] = field(default_factory=lambda: {split: SplitState() for split in SPLITS})


def read_journal(path: Path) -> JournalState | None:
    """Return the state that a journal holds, None when there is none: the file is replaced as a whole, never half."""
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    splits = {split: SplitState(**state) for split, state in values.pop("splits").items()}
    return JournalState(splits=splits, **values)


class FolderWriter:
    """The token, offset and index files of both splits of one folder."""

    def __init__(
        self, folder: Path, journal_path: Path, state: JournalState, *, dtype: str, max_shard_tokens: int
    ) -> None:
        self.state = state
        self._folder = folder
        self._journal_path = journal_path
        self.dtype = np.dtype(dtype)
        self._max_shard_tokens = max_shard_tokens
        self._touched: set[Path] = set()
        for split in SPLITS:
            (folder / split).mkdir(parents=True, exist_ok=True)
            if state.splits[split].documents == 0:
                self._offsets_path(split).write_bytes(np.zeros(1, INDEX_DTYPE).tobytes())
        self._cut_to_state()

    def append(self, documents: Sequence[EncodedDocument]) -> None:
        """Append documents, which come in the order of the text, to the files of their splits."""
        for split in SPLITS:
            chosen = [document for document in documents if document.held_out == (split == "held_out")]
            if chosen:
                self._append_to_split(split, chosen)

    def save_journal(self) -> None:
        """Make what is written survive the machine, then say so in the journal."""
        for path in sorted(self._touched):
            _sync(path)
        self._touched.clear()
        unfinished = self._journal_path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self.state)), encoding="utf-8")
        _sync(unfinished)
        unfinished.replace(self._journal_path)

    def split_record(self, split: str) -> SplitRecord:
        """Return what the manifest says of one split."""
        state = self.state.splits[split]
        return SplitRecord(
            documents=state.documents,
            tokens=state.tokens,
            text_bytes=state.text_bytes,
            shards=tuple(
                ShardRecord(file=self._name(self._shard_path(split, number)), tokens=tokens)
                for number, tokens in enumerate(state.shard_tokens)
            ),
            document_offsets=self._name(self._offsets_path(split)),
            document_indices=self._name(self._indices_path(split)),
        )

    def _append_to_split(self, split: str, documents: Sequence[EncodedDocument]) -> None:
        state = self.state.splits[split]
        pieces: list[bytes] = []
        ends = []
        for document in documents:
            if not state.shard_tokens or state.shard_tokens[-1] >= self._max_shard_tokens:
                self._extend(self._shard_path(split, len(state.shard_tokens) - 1), pieces)
                pieces = []
                state.shard_tokens.append(0)
            pieces.append(document.tokens.tobytes())
            state.shard_tokens[-1] += document.tokens.size
            state.tokens += document.tokens.size
            state.text_bytes += document.text_bytes
            ends.append(state.tokens)
        self._extend(self._shard_path(split, len(state.shard_tokens) - 1), pieces)
        self._extend(self._offsets_path(split), [np.array(ends, INDEX_DTYPE).tobytes()])
        indices = np.array([document.index for document in documents], INDEX_DTYPE)
        self._extend(self._indices_path(split), [indices.tobytes()])
        state.documents += len(documents)

    def _extend(self, path: Path, pieces: list[bytes]) -> None:
        if not pieces:
            return
        with path.open("ab") as file:
            file.writelines(pieces)
        self._touched.add(path)

    def _cut_to_state(self) -> None:
        for split in SPLITS:
            state = self.state.splits[split]
            sizes = {
                self._shard_path(split, number): tokens * self.dtype.itemsize
                for number, tokens in enumerate(state.shard_tokens)
            }
            sizes[self._offsets_path(split)] = (state.documents + 1) * INDEX_BYTES
            if state.documents:
                sizes[self._indices_path(split)] = state.documents * INDEX_BYTES
            for path in (self._folder / split).iterdir():
                if path not in sizes:
                    path.unlink()
            for path, size in sizes.items():
                if not path.is_file() or path.stat().st_size < size:
                    raise DataError(
                        f"{path} is shorter than {self._journal_path} says, so this preparation can't go on: "
                        f"remove {self._journal_path.parent} and start again"
                    )
                os.truncate(path, size)

    def _shard_path(self, split: str, number: int) -> Path:
        return self._folder / split / f"tokens_{number:05d}.bin"

    def _offsets_path(self, split: str) -> Path:
        return self._folder / split / "document_offsets.bin"

    def _indices_path(self, split: str) -> Path:
        return self._folder / split / "document_indices.bin"

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
