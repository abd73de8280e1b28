"""Documents → rows of fixed length. Pure functions of integers and arrays.

The documents of a split, each followed by its end-of-text token, form one stream. Row r feeds the S tokens from r·S on
and predicts the S tokens from r·S + 1 on, so that a row reads S + 1 tokens and shares one with its neighbour: every
token but the first of the stream is predicted exactly once, apart from a tail shorter than S. Which row comes when is
data/order.py's.
"""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def count_rows(num_tokens: int, sequence_length: int) -> int:
    """Return how many whole rows a stream holds; 0 when it is shorter than one row and its last label."""
    return max(0, num_tokens - 1) // sequence_length


def row_span(row: int, sequence_length: int) -> tuple[int, int]:
    """Return the first token of a row in the stream, and the number of tokens to read for its inputs and labels."""
    return row * sequence_length, sequence_length + 1


def document_numbers(first_token: int, sequence_length: int, offsets: Int64Array) -> NDArray[np.int32]:
    """Return, for S tokens of the stream, the number of each token's document, counted from the row's first one.

    ``offsets`` are the positions in the stream where documents start, ascending, with the stream's length at the end.
    """
    # A document that starts at the row's first token is number 0, so only starts after it count.
    begin = int(np.searchsorted(offsets, first_token, side="right"))
    end = int(np.searchsorted(offsets, first_token + sequence_length, side="left"))
    marks_S = np.zeros(sequence_length, np.int32)
    marks_S[offsets[begin:end] - first_token] = 1
    return np.cumsum(marks_S, dtype=np.int32)


def documents_of_span(first_token: int, num_tokens: int, offsets: Int64Array) -> range:
    """Return the numbers, within the split, of the documents that these tokens of the stream belong to."""
    first = int(np.searchsorted(offsets, first_token, side="right")) - 1
    last = int(np.searchsorted(offsets, first_token + num_tokens - 1, side="right")) - 1
    return range(first, last + 1)
