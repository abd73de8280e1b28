"""What knowing only how often each token occurs reaches on held-out text: the first bar for a loss to pass."""

import numpy as np
from numpy.typing import NDArray

from data.shards import TokenStream

READ_TOKENS = 2**24  # at a time; counting needs no more memory than this many ids


def count_tokens(stream: TokenStream, vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token id occurs in the stream."""
    counts_V = np.zeros(vocab_size, np.int64)
    for start in range(0, stream.num_tokens, READ_TOKENS):
        tokens = stream.read(start, min(READ_TOKENS, stream.num_tokens - start))
        counts_V += np.bincount(tokens, minlength=vocab_size)
    return counts_V


def cross_entropy_of_counts(counts_V: NDArray[np.int64], fitted_V: NDArray[np.int64]) -> float:
    """Return the mean negative log-probability, in nats, of tokens counted in ``counts_V``.

    Their probabilities are the frequencies of ``fitted_V`` with one added to every count.
    """
    log_prob_V = np.log(fitted_V + 1.0) - np.log(fitted_V.sum() + float(fitted_V.size))
    return float(-(counts_V * log_prob_V).sum() / counts_V.sum())


def entropy_of_counts(counts_V: NDArray[np.int64]) -> float:
    """Return the entropy, in nats, of the frequencies in ``counts_V``."""
    seen = counts_V[counts_V > 0]
    return float(np.log(counts_V.sum()) - (seen * np.log(seen)).sum() / counts_V.sum())
