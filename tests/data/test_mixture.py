import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.mixture import build_interleave


@given(st.lists(st.integers(1, 60), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_every_prefix_keeps_the_weights_within_the_stated_bound(weights):
    M = len(weights)
    n = 2 * sum(weights) + 3
    source_N, _ = build_interleave(weights).locate(np.arange(n))
    counts_NM = (source_N[:, None] == np.arange(M)).cumsum(axis=0)
    owed_NM = np.arange(1, n + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts_NM - owed_NM).max() <= 1 - 1 / (2 * M - 2) + 1e-9  # the sums are exact to 1e-12


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_ordinals_count_the_samples_of_each_source(weights):
    source_N, ordinal_N = build_interleave(weights).locate(np.arange(200))
    for source in range(len(weights)):
        chosen = ordinal_N[source_N == source]
        assert np.array_equal(chosen, np.arange(chosen.size))


def test_weights_are_relative():
    first, second = (build_interleave(weights).locate(np.arange(500)) for weights in ([0.7, 0.3], [7, 3]))
    assert np.array_equal(first[0], second[0])


def test_one_source_gives_every_sample():
    source_N, ordinal_N = build_interleave([0.3]).locate(np.array([0, 5, 10**12]))
    assert source_N.tolist() == [0, 0, 0]
    assert ordinal_N.tolist() == [0, 5, 10**12]


def test_weights_with_too_many_digits_are_refused():
    with pytest.raises(DataError, match=r"data\.mixture.*fewer digits"):
        build_interleave([0.1234567, 0.7654321])
