import numpy as np
import pytest

from data.split import HeldOutChoice


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
