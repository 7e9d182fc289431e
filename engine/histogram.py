"""A histogram that costs a fraction of a microsecond to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class HistogramTotals(NamedTuple):
    """How many values were in each bucket, the last of which has no upper bound, and the sum of all."""

    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts values by ascending upper ``bounds``; a value that equals a bound is within it.

    One thread adds. Others may read ``totals`` at any time; a value that is being added may be counted there
    and not be in the sum yet.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def totals(self) -> HistogramTotals:
        """All that was added so far."""
        return HistogramTotals(tuple(self._counts), self._sum)
