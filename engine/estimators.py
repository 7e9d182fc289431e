"""Running figures of what steps measure: the cost of a unit of work, and a median."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

STALE = 64
"""Decisions without a measurement after which a rate is doubted; also the fewest from one trial to the next."""

_MEMORY = 16.0  # typical measurements over which a cost is averaged
_CALIBRATION = 1.0  # what a calibration counts for, in typical measurements
_DOUBTED = 0.5  # what a stale average still counts for
_LARGEST = 4.0  # a measurement counts for at most this many typical ones
_SLOWEST = 4.0  # a measurement is taken to be at most this many times slower than the average
_RECENT = 32  # measurements whose median is the likely cost
_ENOUGH = 8  # fewer of them say less than the average


class RunningMedian:
    """Median of the last ``size`` values that were added; kept sorted, so that reading it costs nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take ``value`` in, which is a number, and forget the oldest if there are too many."""
        self._recent.append(value)
        insort(self._sorted, value)
        if len(self._recent) > self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    @property
    def value(self) -> float | None:
        """The median, the mean of the two in the middle of an even number; ``None`` of nothing."""
        count = len(self._sorted)
        if not count:
            return None
        return (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2.0


class UnitCost:
    """Average seconds of a unit, over the last measurements, each weighted by its units.

    Sizes are counted in typical measurements (the average size, itself weighted by size), so that the memory
    is equally long for small and large requests. Averaging seconds, not rates, bounds what a measurement that
    was too fast can do; one that was too slow is cut off.

    What most measurements are near is the median, ``likely``: a few slow steps raise the average above it.

    Args:
        rate: units a second as calibrated, 0 where unknown.
    """

    def __init__(self, rate: float) -> None:
        self.seconds = 1.0 / rate if rate > 0 else None
        self._weight = _CALIBRATION if rate > 0 else 0.0
        self._typical = 0.0
        self._recent = RunningMedian(_RECENT)
        self._measured = 0
        self.last_seen = 0  # number of the decision after which it was measured last

    @property
    def rate(self) -> float:
        """Units a second, 0 where unknown."""
        return 1.0 / self.seconds if self.seconds else 0.0

    @property
    def likely(self) -> float | None:
        """Median seconds of a unit; the average while there are few measurements."""
        return self._recent.value if self._measured >= _ENOUGH else self.seconds

    def is_stale(self, decisions: int) -> bool:
        """Whether the last measurement lies :data:`STALE` decisions before ``decisions``."""
        return decisions - self.last_seen >= STALE

    def measure(self, units: int, seconds: float, decisions: int) -> None:
        """Refine the average; a measurement without time or units says nothing."""
        if units <= 0 or seconds <= 0:
            return
        if self.is_stale(decisions):
            self._weight = min(self._weight, _DOUBTED)
        self.last_seen = decisions
        size = min(units / self._typical, _LARGEST) if self._typical else 1.0
        self._typical += (units - self._typical) * (size / (_MEMORY + size) if self._typical else 1.0)
        measured = seconds / units
        self._recent.add(measured)
        self._measured += 1
        if self.seconds is None:
            self.seconds = measured
        else:
            measured = min(measured, self.seconds * _SLOWEST)
            self.seconds += (measured - self.seconds) * size / (self._weight + size)
        self._weight = min(self._weight + size, _MEMORY)
