"""Documents → token ids, in the order of the text and with all cores, handed to the writer.

The tokenizers library spreads each block of documents over the cores by itself (RAYON_NUM_THREADS limits them), while
the next blocks are read. What the files look like is data/writer.py's.
"""

import time
from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data.errors import DataError
from data.progress import Progress
from data.sources import Source, read_documents
from data.writer import EncodedDocument, FolderWriter

# What is handed to the tokenizer at a time. Neither number shows in the files.
BLOCK_CHARACTERS = 2**20
BLOCK_DOCUMENTS = 4096
BLOCKS_AHEAD = 3  # read while another is encoded


@dataclass(frozen=True)
class Document:
    """One document as it is read: which source, its number over all sources, its text."""

    source: int
    index: int
    text: str


@dataclass(frozen=True)
class Text:
    """All documents of some sources, in a fixed order."""

    sources: tuple[Source, ...]
    text_field: str
    skip_empty: bool

    def documents(self) -> Iterator[Document]:
        """Yield every document; where empty ones may be skipped they are yielded too, so that numbers stay the text's.

        Raises:
            DataError: at an empty document that may not be skipped, or where a source can't be read.
        """
        index = 0
        for number, source in enumerate(self.sources):
            for place, text in enumerate(read_documents(source, self.text_field)):
                if not self.skip_empty and not text.strip():
                    raise DataError(f"{source.name}: document {place} is empty; --skip-empty leaves such documents out")
                yield Document(number, index, text)
                index += 1


def training_texts(text: Text, held_out: Container[int], *, max_bytes: int) -> Iterator[str]:
    """Yield the texts that aren't held out until there are ``max_bytes`` of them in UTF-8."""
    left_bytes = max_bytes
    for document in text.documents():
        if document.index in held_out:
            continue
        yield document.text
        left_bytes -= len(document.text.encode())
        if left_bytes <= 0:
            return


@dataclass(frozen=True)
class Encoder:
    """What turns documents into tokens and tells their split."""

    tokenizer: Tokenizer
    eos_id: int
    dtype: "np.dtype[Any]"
    held_out: Container[int]

    def encode(self, block: list[Document]) -> list[EncodedDocument]:
        """Return the tokens of every document that isn't empty, each with the end-of-text token behind."""
        kept = [document for document in block if document.text.strip()]
        encodings = self.tokenizer.encode_batch_fast([document.text for document in kept], add_special_tokens=False)
        return [
            EncodedDocument(
                index=document.index,
                held_out=document.index in self.held_out,
                text_bytes=len(document.text.encode()),
                tokens=np.array([*encoding.ids, self.eos_id], self.dtype),
            )
            for document, encoding in zip(kept, encodings, strict=True)
        ]


def write_documents(
    text: Text, encoder: Encoder, writer: FolderWriter, progress: Progress, *, journal_interval_s: float
) -> None:
    """Append to the writer's files every document that they don't hold yet."""

    def append(block: list[Document], encoded: list[EncodedDocument]) -> None:
        writer.append(encoded)
        for document in block:
            writer.state.documents_read[document.source] += 1
        writer.state.documents_skipped_empty += len(block) - len(encoded)
        progress.add(
            documents=len(encoded),
            text_bytes=sum(document.text_bytes for document in encoded),
            tokens=sum(document.tokens.size for document in encoded),
        )

    progress.start()
    saved_s = time.monotonic()
    waiting: deque[tuple[list[Document], Future[list[EncodedDocument]]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as executor:
        for block in _blocks(text, skip=sum(writer.state.documents_read)):
            waiting.append((block, executor.submit(encoder.encode, block)))
            if len(waiting) > BLOCKS_AHEAD:
                first, future = waiting.popleft()
                append(first, future.result())
                if time.monotonic() - saved_s >= journal_interval_s:
                    writer.save_journal()
                    saved_s = time.monotonic()
        for block, future in waiting:
            append(block, future.result())


def _blocks(text: Text, *, skip: int) -> Iterator[list[Document]]:
    block: list[Document] = []
    characters = 0
    for document in islice(text.documents(), skip, None):
        block.append(document)
        characters += len(document.text)
        if characters >= BLOCK_CHARACTERS or len(block) >= BLOCK_DOCUMENTS:
            yield block
            block, characters = [], 0
    if block:
        yield block
