"""Memory-mapped token files of one split, read as one long stream of tokens with documents by offset.

The files are raw little-endian arrays, listed in the manifest (data/manifest.py) and written by data/writer.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.manifest import SplitRecord

Int64Array = NDArray[np.int64]

INDEX_DTYPE = "<i8"


def token_dtype(vocab_size: int) -> str:
    """Return the smallest type that holds every token id, as numpy writes it: two bytes or four."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class TokenStream:
    """Tokens of several files, one after the other."""

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: str) -> None:
        self._shards = [np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,)) for path, num_tokens in files]
        self._starts = np.cumsum([0, *(num_tokens for _, num_tokens in files)])
        self.num_tokens = int(self._starts[-1])

    def read(self, start: int, count: int) -> Int64Array:
        """Return a copy of ``count`` tokens from ``start`` on.

        Raises:
            IndexError: when they don't all exist; a shorter answer would be taken for data.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens {start} to {start + count} don't lie in a stream of {self.num_tokens} tokens")
        tokens = np.empty(count, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            local = start + filled - int(self._starts[shard])
            piece = self._shards[shard][local : local + count - filled]
            tokens[filled : filled + piece.size] = piece
            filled += piece.size
            shard += 1
        return tokens


class Split:
    """One split of a prepared folder: its tokens and where its documents are."""

    def __init__(self, folder: Path, record: SplitRecord, dtype: str) -> None:
        self.tokens = TokenStream([(folder / shard.file, shard.tokens) for shard in record.shards], dtype)
        self.document_offsets: Int64Array = np.memmap(
            folder / record.document_offsets, dtype=INDEX_DTYPE, mode="r", shape=(record.documents + 1,)
        )
        self.document_indices: Int64Array = np.memmap(
            folder / record.document_indices, dtype=INDEX_DTYPE, mode="r", shape=(record.documents,)
        )

    def document(self, number: int) -> Int64Array:
        """Return the tokens of one document of this split, with its end-of-text token."""
        start, end = self.document_offsets[number : number + 2].tolist()
        return self.tokens.read(start, end - start)
