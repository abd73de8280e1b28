"""Global sample index → (source, epoch, row): pure functions of integers.

Nothing here depends on a library's random stream, on the size of a batch or on the number of processes, so the count of
samples consumed is all that a resumed run needs. How several sources share the sample indices is data/mixture.py's.
The values are a file format: changing them changes the order in which every run reads its data, and a test pins them.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from data.mixture import Interleave

UInt64Array = NDArray[np.uint64]
Int64Array = NDArray[np.int64]

ROUNDS = 12  # of the Feistel network; four suffice for large domains, domains of a few rows need more
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Located(NamedTuple):
    """Where N samples come from."""

    source_N: Int64Array
    epoch_N: Int64Array
    row_N: Int64Array


class Order(Protocol):
    """A pure function from global sample index to row."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all sources together, which is one epoch."""

    def locate(self, sample_N: Int64Array) -> Located:
        """Return source, epoch and row of each sample index, which may be any non-negative number."""


def mix64(value_N: UInt64Array) -> UInt64Array:
    """Return a 64-bit hash of every number; a bijection.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    value_N = value_N + np.uint64(_GOLDEN)
    value_N = (value_N ^ (value_N >> np.uint64(30))) * np.uint64(_FACTORS[0])
    value_N = (value_N ^ (value_N >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return value_N ^ (value_N >> np.uint64(31))


def combine(*parts: int) -> int:
    """Return one 64-bit hash of several non-negative integers below 2**64; their order counts."""
    state = 0
    for part in parts:
        state = _mix_int(state ^ _mix_int(part))
    return state


def _mix_int(value: int) -> int:
    """Return what mix64 returns for one number, without the cost of an array: it is called once for every document."""
    mask = 2**64 - 1
    value = (value + _GOLDEN) & mask
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & mask
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & mask
    return value ^ (value >> 31)


def permute(index_N: Int64Array, num: int, *, key: int) -> Int64Array:
    """Return where a permutation of range(num), chosen by ``key``, sends every index.

    A Feistel network permutes the next power of two; an index that lands outside range(num) is sent on until it lands
    inside (cycle walking), fewer than two steps on average.

    Raises:
        ValueError: for an index outside range(num).
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), their generalised Feistel cipher.
    """
    if index_N.size and not 0 <= index_N.min() <= index_N.max() < num:
        raise ValueError(f"indices from {index_N.min()} to {index_N.max()} don't lie in range({num})")
    num_bits = (num - 1).bit_length()
    round_keys = mix64(np.uint64(key) + np.uint64(_GOLDEN) * np.arange(1, ROUNDS + 1, dtype=np.uint64))
    value_N = index_N.astype(np.uint64)
    outside = np.arange(value_N.size)
    while outside.size:
        value_N[outside] = _feistel(value_N[outside], num_bits, round_keys)
        outside = outside[value_N[outside] >= num]
    return value_N.astype(np.int64)


def _feistel(value_N: UInt64Array, num_bits: int, round_keys: UInt64Array) -> UInt64Array:
    low_bits = np.uint64(num_bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(num_bits - num_bits // 2)) - np.uint64(1)
    high_N, low_N = value_N >> low_bits, value_N & low_mask
    for number, round_key in enumerate(round_keys):
        # Each round changes one half by a function of the other, so it is undone by itself, whatever the function.
        if number % 2 == 0:
            high_N = high_N ^ (mix64(low_N ^ round_key) & high_mask)
        else:
            low_N = low_N ^ (mix64(high_N ^ round_key) & low_mask)
    return (high_N << low_bits) | low_N


@dataclass(frozen=True)
class PlainOrder:
    """Every row of the first source as the text has them, then those of the next, and again from the start."""

    rows_per_source: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all sources together."""
        return sum(self.rows_per_source)

    def locate(self, sample_N: Int64Array) -> Located:
        """Return source, epoch and row of each sample index."""
        epoch_N, place_N = np.divmod(sample_N, self.num_rows)
        ends = np.cumsum(self.rows_per_source)
        source_N = np.searchsorted(ends, place_N, side="right").astype(np.int64)
        starts = ends - np.array(self.rows_per_source)
        return Located(source_N, epoch_N, place_N - starts[source_N])


@dataclass(frozen=True)
class ShuffledOrder:
    """Sources take turns by a fixed interleave; each walks its rows in another permutation every epoch of its own."""

    rows_per_source: tuple[int, ...]
    seed: int
    interleave: Interleave

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all sources together."""
        return sum(self.rows_per_source)

    def locate(self, sample_N: Int64Array) -> Located:
        """Return source, epoch of that source and row of each sample index."""
        source_N, ordinal_N = self.interleave.locate(sample_N)
        rows_per_source = np.array(self.rows_per_source, np.int64)
        epoch_N, place_N = np.divmod(ordinal_N, rows_per_source[source_N])
        row_N = np.empty_like(place_N)
        for source, epoch in sorted(set(zip(source_N.tolist(), epoch_N.tolist(), strict=True))):
            chosen = np.flatnonzero((source_N == source) & (epoch_N == epoch))
            key = combine(self.seed, source, epoch)
            row_N[chosen] = permute(place_N[chosen], self.rows_per_source[source], key=key)
        return Located(source_N, epoch_N, row_N)
