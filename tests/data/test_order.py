import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.mixture import build_interleave
from data.order import PlainOrder, ShuffledOrder, combine, mix64, permute


def shuffled(num_rows: int, seed: int = 0) -> ShuffledOrder:
    return ShuffledOrder((num_rows,), seed, build_interleave([1.0]))


def test_permutation_is_a_bijection_for_every_small_number_of_rows():
    for num in range(1, 2001):
        assert np.array_equal(np.sort(permute(np.arange(num), num, key=num)), np.arange(num)), num


@pytest.mark.parametrize("num", [2**16, 2**16 + 1, 2**17 - 1, 300_007])
def test_permutation_is_a_bijection_for_large_numbers_of_rows(num):
    assert np.array_equal(np.sort(permute(np.arange(num), num, key=7)), np.arange(num))


@pytest.mark.parametrize("num", [2**40 + 12345, 2**62])
def test_permutation_of_more_rows_than_memory_holds_stays_inside_and_distinct(num):
    index_N = np.arange(num - 20_000, num)
    value_N = permute(index_N, num, key=3)
    assert value_N.min() >= 0
    assert value_N.max() < num
    assert np.unique(value_N).size == index_N.size


def test_every_permutation_of_four_rows_is_equally_likely():
    num_keys = 4800
    order = [tuple(permute(np.arange(4), 4, key=combine(1, key)).tolist()) for key in range(num_keys)]
    counts = np.array([order.count(permutation) for permutation in set(order)])
    assert counts.size == 24
    expected = num_keys / 24
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 23 + 5 * np.sqrt(2 * 23)  # 23 degrees of freedom: mean 23, variance 46


def test_place_and_row_are_uncorrelated():
    num = 50_000
    row_N = shuffled(num).locate(np.arange(num)).row_N
    limit = 5 / np.sqrt(num)
    assert abs(np.corrcoef(np.arange(num), row_N)[0, 1]) < limit
    assert abs(np.corrcoef(row_N[:-1], row_N[1:])[0, 1]) < limit


def test_epochs_have_different_orders():
    num = 5000
    row_N = shuffled(num).locate(np.arange(3 * num)).row_N.reshape(3, num)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert (row_N[first] == row_N[second]).sum() < 10  # the number of coincidences is about Poisson with mean 1
        assert abs(np.corrcoef(row_N[first], row_N[second])[0, 1]) < 5 / np.sqrt(num)


def test_seeds_have_different_orders():
    num = 5000
    first, second = (shuffled(num, seed).locate(np.arange(num)).row_N for seed in (0, 1))
    assert (first == second).sum() < 10


def test_every_row_comes_once_an_epoch():
    located = shuffled(101).locate(np.arange(303))
    assert np.array_equal(located.epoch_N, np.repeat([0, 1, 2], 101))
    for epoch in range(3):
        assert np.array_equal(np.sort(located.row_N[located.epoch_N == epoch]), np.arange(101))


def test_hash_of_numbers_is_the_hash_of_arrays():
    values = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    mixed = mix64(np.array(values, np.uint64))
    for value, expected in zip(values, mixed, strict=True):
        assert combine(value) == int(mix64(expected[None])[0])


def test_order_is_the_one_that_earlier_runs_had():
    assert mix64(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    located = shuffled(1000, seed=42).locate(np.array([0, 1, 2, 999, 1000, 123_456_789]))
    assert located.row_N.tolist() == [294, 558, 348, 643, 192, 4]
    assert combine(1, 2, 3) == 0x882D1ACC8D6C3B48


@given(st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_order_does_not_depend_on_how_samples_are_asked_for(first, sizes):
    order = ShuffledOrder((17, 40, 5), 9, build_interleave([3, 2, 1]))
    whole = order.locate(np.arange(first, first + sum(sizes)))
    ends = np.cumsum([first, *sizes])
    parts = [order.locate(np.arange(start, end)) for start, end in itertools.pairwise(ends.tolist())]
    for name in whole._fields:
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))


def test_plain_order_walks_the_sources_one_after_the_other():
    located = PlainOrder((2, 3)).locate(np.arange(7))
    assert located.source_N.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert located.row_N.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert located.epoch_N.tolist() == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("index", [-1, 5])
def test_permutation_refuses_indices_outside_its_range(index):
    with pytest.raises(ValueError, match=r"range\(5\)"):
        permute(np.array([index]), 5, key=0)
