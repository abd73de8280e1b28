"""Which documents are held out: a pure function of the document's number, the seed and the fraction.

In every stretch of 1/fraction documents, in the order of the text, a seeded hash picks one. So the held-out documents
are spread evenly over the text, their share is exact, and the choice needs neither the number of documents nor their
contents. Only of a text too short to reach a held-out document is one taken in any case. Rows, not documents, are
shuffled for training: that is data/order.py's.
"""

import math
from collections.abc import Container, Iterable
from fractions import Fraction

from data.errors import DataError
from data.order import combine


class HeldOutChoice:
    """The choice for one seed and one fraction, which is taken as the decimal number that it prints as."""

    def __init__(self, fraction: float, seed: int) -> None:
        self._held_out, self._of = Fraction(repr(fraction)).as_integer_ratio()
        self._seed = seed

    def __contains__(self, document: object) -> bool:
        """Return whether the document with this number, counted from 0 over all text, is held out."""
        assert isinstance(document, int)
        stretch = document * self._held_out // self._of
        first, end = (-(-number * self._of // self._held_out) for number in (stretch, stretch + 1))
        return document == first + combine(self._seed, stretch) % (end - first)


def choose_held_out(documents: Iterable[int], fraction: float, seed: int) -> Container[int]:
    """Return which documents are held out, so that neither split is empty.

    It is ``HeldOutChoice``, or a single document of a text that ends before both its splits have one. ``documents`` are
    the numbers of those that aren't empty, read only until both have one.

    Raises:
        DataError: if there are fewer than two documents.
    """
    choice = HeldOutChoice(fraction, seed)
    numbers: list[int] = []
    splits: set[bool] = set()
    for document in documents:
        numbers.append(document)
        splits.add(document in choice)
        if len(splits) == 2:
            return choice
    if len(numbers) < 2:
        fewest = math.ceil(1 / Fraction(repr(fraction)))
        raise DataError(
            f"the text has {len(numbers) or 'no'} document{'s' * (not numbers)}, empty ones not counted, but one is "
            f"held out: at least 2 are needed, and {fewest} for one to be no more than "
            f"--held-out-fraction {fraction}. A .txt file is one document: write its parts to a .jsonl, one "
            '{"text": "..."} a line, or give more files'
        )
    return frozenset({numbers[combine(seed, 0) % len(numbers)]})
