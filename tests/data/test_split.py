import numpy as np
import pytest

from data.errors import DataError
from data.split import HeldOutChoice, choose_held_out


def held_out(fraction: float, seed: int, num: int) -> np.ndarray:
    choice = HeldOutChoice(fraction, seed)
    return np.array([document for document in range(num) if document in choice])


@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.1, 0.05, 0.01])
def test_the_share_held_out_is_exact_over_any_prefix(fraction):
    documents = held_out(fraction, 3, 2000)
    for num in range(100, 2001, 100):
        assert abs((documents < num).sum() - fraction * num) <= 1


def test_held_out_documents_are_spread_over_the_text():
    assert np.array_equal(held_out(0.05, 11, 400) // 20, np.arange(20))


def test_seeds_hold_out_different_documents_at_uneven_distances():
    first, second = held_out(0.05, 0, 4000), held_out(0.05, 1, 4000)
    assert np.intersect1d(first, second).size < 40  # one in twenty of 200 by chance
    places = np.bincount(first % 20, minlength=20)
    assert places.min() >= 1
    assert places.max() <= 30


def test_a_text_long_enough_for_both_splits_keeps_the_choice_of_the_seed():
    for seed in range(20):
        first = next(document for document in range(20) if document in HeldOutChoice(0.05, seed))
        for num in range(max(first + 1, 2), 60):
            choice = choose_held_out(iter(range(num)), 0.05, seed)
            assert [n for n in range(num) if n in choice] == held_out(0.05, seed, num).tolist()


@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.05, 0.0005])
def test_no_split_is_empty_from_two_documents_on(fraction):
    chosen = set()
    for seed in range(20):
        for numbers in ([0, 1], [3, 4, 9], list(range(7))):
            choice = choose_held_out(numbers, fraction, seed)
            share = sum(number in choice for number in numbers)
            assert 0 < share < len(numbers)
            if len(numbers) == 7 and share == 1:
                chosen.update(number for number in numbers if number in choice)
    assert fraction > 0.1 or len(chosen) > 3, "the seed decides which one"


def test_only_the_documents_that_decide_are_read():
    documents = iter(range(1000))
    choose_held_out(documents, 0.1, 0)
    assert next(documents) <= 10


def test_one_document_cannot_be_split():
    for numbers, found in (([], "no documents"), ([5], "1 document,")):
        with pytest.raises(DataError, match=rf"has {found}.*at least 2 are needed, and 2000 for one .*0\.0005"):
            choose_held_out(numbers, 0.0005, 0)
