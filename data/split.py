"""Which documents are held out: a pure function of the document's number, the seed and the fraction.

In every stretch of 1/fraction documents, in the order of the text, a seeded hash picks one. So the held-out documents
are spread evenly over the text, their share is exact, and the choice needs neither the number of documents nor their
contents. Rows, not documents, are shuffled for training: that is data/order.py's.
"""

from fractions import Fraction

from data.order import combine


class HeldOutChoice:
    """The choice for one seed and one fraction, which is taken as the decimal number that it prints as."""

    def __init__(self, fraction: float, seed: int) -> None:
        self._held_out, self._of = Fraction(repr(fraction)).as_integer_ratio()
        self._seed = seed

    def __contains__(self, document: int) -> bool:
        """Return whether the document with this number, counted from 0 over all text, is held out."""
        stretch = document * self._held_out // self._of
        first, end = (-(-number * self._of // self._held_out) for number in (stretch, stretch + 1))
        return document == first + combine(self._seed, stretch) % (end - first)
