"""Which source each sample comes from: a fixed, periodic interleave that keeps mixture weights over every prefix.

Of M sources with weights w (summing to 1), the first n samples hold between n·w - 1 and n·w + 1 of each source, for
every n: the deviation is at most 1 - 1/(2M - 2). No randomness and no state; which rows a source gives is
data/order.py's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError

Int64Array = NDArray[np.int64]

MAX_PERIOD = 100_000  # samples; the table is built at start, in about a second when it is this long


@dataclass(frozen=True, eq=False)
class Interleave:
    """One period of P samples, repeated for ever, over M sources."""

    source_P: Int64Array  # the source of each sample of the period
    rank_P: Int64Array  # how many earlier samples of the period have the same source
    count_M: Int64Array  # samples of each source in a period

    def locate(self, sample_N: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each sample, and how many samples before it came from that source."""
        period_N, place_N = np.divmod(sample_N, self.source_P.size)
        source_N = self.source_P[place_N]
        return source_N, period_N * self.count_M[source_N] + self.rank_P[place_N]


def build_interleave(weights: Sequence[float]) -> Interleave:
    """Return the interleave of sources with these positive weights, taken as the decimal numbers that they print as.

    Raises:
        DataError: if the weights have so many digits that the pattern would repeat only after MAX_PERIOD samples.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    shares = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(shares)
    period = math.lcm(*((share / total).denominator for share in shares))
    if period > MAX_PERIOD:
        raise DataError(
            f"data.mixture weights {list(weights)} repeat only every {period} samples, {MAX_PERIOD} is the most: "
            "give them with fewer digits, for example as whole percentages"
        )
    count_M = [int(share / total * period) for share in shares]
    source_P = _chairman_assignment(count_M, period)
    rank_P = np.empty(period, np.int64)
    for source, count in enumerate(count_M):
        rank_P[source_P == source] = np.arange(count)
    return Interleave(source_P, rank_P, np.array(count_M, np.int64))


def _chairman_assignment(count_M: list[int], period: int) -> Int64Array:
    M = len(count_M)
    source_P = np.zeros(period, np.int64)
    if M == 1:
        return source_P
    scale = 2 * M - 2
    # All in units of 1 / (period · scale): what a source is owed counts the sample about to be given out.
    owed_M = [0] * M
    for place in range(period):
        chosen, slack, slack_count = -1, 0, 1
        for source, count in enumerate(count_M):
            owed_M[source] += count * scale
            if owed_M[source] < period:  # owed less than 1 / scale of a sample: too early for this source
                continue
            # The source whose debt would first pass 1 - 1/scale goes first: the smallest (limit - owed) / weight.
            candidate = period * (scale - 1) - owed_M[source]
            if chosen < 0 or candidate * slack_count < slack * count:
                chosen, slack, slack_count = source, candidate, count
        owed_M[chosen] -= period * scale
        source_P[place] = chosen
    return source_P
