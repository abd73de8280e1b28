import math

import numpy as np
import pytest

from data.shards import TokenStream
from data.unigram import count_tokens, cross_entropy_of_counts, entropy_of_counts


def test_counts_are_those_of_all_files(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 1000).astype("<u2")
    tokens[:300].tofile(tmp_path / "a")
    tokens[300:].tofile(tmp_path / "b")
    stream = TokenStream([(tmp_path / "a", 300), (tmp_path / "b", 700)], "<u2")
    assert np.array_equal(count_tokens(stream, 60), np.bincount(tokens, minlength=60))


def test_cross_entropy_is_that_of_smoothed_frequencies():
    # Fitted counts (3, 1, 0) give probabilities 4/7, 2/7, 1/7.
    loss = cross_entropy_of_counts(np.array([1, 1, 2]), np.array([3, 1, 0]))
    assert loss == pytest.approx(-(math.log(4 / 7) + math.log(2 / 7) + 2 * math.log(1 / 7)) / 4, rel=1e-12)


def test_entropy_of_equal_frequencies_is_the_logarithm_of_their_number():
    assert entropy_of_counts(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4), rel=1e-12)


def test_no_fitted_distribution_beats_the_entropy():
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 20, 100)
    assert cross_entropy_of_counts(counts, counts * 10**9) == pytest.approx(entropy_of_counts(counts), rel=1e-6)
    assert cross_entropy_of_counts(counts, generator.integers(0, 20, 100)) > entropy_of_counts(counts)
