"""Running estimates of measured costs: of a unit of work, of a call by its size, and a running median."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, replace

STALE = 64
"""Decisions without a measurement after which a rate is doubted; also the fewest from one trial to the next."""

_MEMORY = 16.0  # typical measurements over which a cost is averaged
_CALIBRATION = 1.0  # what a calibration counts for, in typical measurements
_STALE_WEIGHT = 0.5  # what a stale average still counts for
_LARGEST = 4.0  # a measurement counts for at most this many typical ones
_SLOWEST = 4.0  # a measurement is cut to at most this many times the average
_RECENT = 32  # measurements whose median is the likely cost
_ENOUGH = 8  # fewer of them say less than the average
_LINE_FADES = 1.0 / 64.0  # what each measurement takes from the weight of those before, for the fixed part
_LINE_PRIOR = 1.0  # measurements that the calibrated fixed part is worth, at each of two sizes
_LINE_CUT = 2.0  # a measurement is cut to at most this factor off the likely cost, for the fixed part
_MAX_FIXED = 4.0  # the fixed part is at most this many typical calls without it


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

    Most measurements are near the median, ``likely``: a few slow steps raise the average above it.

    Args:
        rate: units a second as calibrated, 0 where unknown.
    """

    def __init__(self, rate: float) -> None:
        self.seconds = 1.0 / rate if rate > 0 else None
        self._weight = _CALIBRATION if rate > 0 else 0.0
        self.typical = 0.0  # units of a measurement
        self._recent = RunningMedian(_RECENT)
        self._scale = 1.0  # of the values in there
        self._measured = 0
        self.last_seen = 0  # number of the decision after which it was measured last

    @property
    def rate(self) -> float:
        """Units a second, 0 where unknown."""
        return 1.0 / self.seconds if self.seconds else 0.0

    @property
    def likely(self) -> float | None:
        """Median seconds of a unit; the average while there are few measurements."""
        recent = self._recent.value
        return self.seconds if recent is None or self._measured < _ENOUGH else recent * self._scale

    def is_stale(self, decisions: int) -> bool:
        """Whether the last measurement lies :data:`STALE` decisions before ``decisions``."""
        return decisions - self.last_seen >= STALE

    def enlarge(self, factor: float) -> None:
        """Count in units that are ``factor`` times as large from now on."""
        if self.seconds is not None:
            self.seconds *= factor
        self.typical /= factor
        self._scale *= factor

    def measure(self, units: float, seconds: float, decisions: int) -> None:
        """Refine the average; a measurement without time or units says nothing."""
        if units <= 0 or seconds <= 0:
            return
        if self.is_stale(decisions):
            self._weight = min(self._weight, _STALE_WEIGHT)
        self.last_seen = decisions
        size = min(units / self.typical, _LARGEST) if self.typical else 1.0
        self.typical += (units - self.typical) * (size / (_MEMORY + size) if self.typical else 1.0)
        measured = seconds / units
        self._recent.add(measured / self._scale)
        self._measured += 1
        if self.seconds is None:
            self.seconds = measured
        else:
            measured = min(measured, self.seconds * _SLOWEST)
            self.seconds += (measured - self.seconds) * size / (self._weight + size)
        self._weight = min(self._weight + size, _MEMORY)


@dataclass(slots=True)
class _Line:
    """Least squares for ``y = a + b * x``: sums over weighted points."""

    weight: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def fade(self, share: float) -> None:
        """Take ``share`` of the weight of all points so far."""
        kept = 1.0 - share
        self.weight *= kept
        self.x *= kept
        self.xx *= kept
        self.y *= kept
        self.xy *= kept

    def add(self, x: float, y: float, weight: float) -> None:
        self.weight += weight
        self.x += weight * x
        self.xx += weight * x * x
        self.y += weight * y
        self.xy += weight * x * y

    def solve(self) -> tuple[float, float]:
        """``a`` and ``b``; there are two different ``x``."""
        slope = (self.weight * self.xy - self.x * self.y) / (self.weight * self.xx - self.x * self.x)
        return (self.y - slope * self.x) / self.weight, slope


class CallCost:
    """Seconds of a call that has a fixed part and a part for each unit: ``unit * (units + fixed)``.

    ``unit`` is a :class:`UnitCost` that counts the fixed part as so many units more, and so has its weights,
    its cuts and its median. ``fixed`` is that of a straight line through the measurements, each weighted so
    that its *relative* error counts, and cut where it is far off. Measurements fade; two points at half and
    twice the typical size, where the calibrated fixed part puts them, do not: while all calls are alike they
    say nothing of the fixed part, and the calibrated one stays.

    Args:
        rate: units a second without the fixed part, as calibrated; 0 where unknown.
        call_seconds: the fixed part, as calibrated; it means nothing without ``rate``.
        refit: ``False`` keeps the fixed part as it is, for measurements that do not show it.
    """

    def __init__(self, rate: float, call_seconds: float = 0.0, *, refit: bool = True) -> None:
        self._unit = UnitCost(rate)
        self._calibrated = self._fixed = call_seconds * max(rate, 0.0)
        self._refit = refit
        self._line = _Line()

    @property
    def rate(self) -> float:
        """Units a second without the fixed part, 0 where unknown."""
        return self._unit.rate

    @property
    def call_seconds(self) -> float:
        """The fixed part."""
        return self._fixed * (self._unit.seconds or 0.0)

    def is_stale(self, decisions: int) -> bool:
        """See :meth:`UnitCost.is_stale`."""
        return self._unit.is_stale(decisions)

    def mean(self, units: float) -> float | None:
        """Mean seconds of such a call; 0 for no units; ``None`` where unknown."""
        return self._cost(units, self._unit.seconds)

    def likely(self, units: float) -> float | None:
        """Median seconds of such a call."""
        return self._cost(units, self._unit.likely)

    def measure(self, units: int, seconds: float, decisions: int) -> None:
        """Refine all estimates; a call without time or units says nothing."""
        if units <= 0 or seconds <= 0:
            return
        self._unit.measure(units + self._fixed, seconds, decisions)
        if not self._refit:
            return
        unit = self._unit.likely
        assert unit is not None, "it was measured"
        # In units, not seconds: a time at which all seemed faster than it is must not weigh more.
        expected = units + self._fixed
        measured = min(max(seconds / unit, expected / _LINE_CUT), expected * _LINE_CUT)
        self._line.fade(_LINE_FADES)
        self._line.add(units, measured, expected**-2)
        typical = max(self._unit.typical - self._fixed, 1.0)
        level = (typical + self._fixed) / (typical + self._calibrated)
        line = replace(self._line)
        for size in (typical / 2.0, typical * 2.0):
            line.add(size, level * (size + self._calibrated), _LINE_PRIOR * (size + self._fixed) ** -2)
        intercept, slope = line.solve()
        largest = _MAX_FIXED * typical
        fixed = min(max(intercept, 0.0) / slope, largest) if slope > 0 else largest
        self._unit.enlarge(
            (typical + self._fixed) / (typical + fixed)
        )  # a typical call costs as much as before
        self._fixed = fixed

    def _cost(self, units: float, unit: float | None) -> float | None:
        if units <= 0:
            return 0.0
        return None if unit is None else unit * (units + self._fixed)
