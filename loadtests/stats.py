"""Statistics of measurements: quantiles, medians, ratios, and timings of calls that take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed; not a number of none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones; not a number of none."""
    return statistics.median(values) if values else math.nan


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; not a number of none."""
    return statistics.fmean(values) if values else math.nan


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """One median over the other; infinite over nothing."""
    below = median(under)
    return median(over) / below if below else math.inf


def by_turns(rounds: int, *calls: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each call in each round. The calls take turns, so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            own.append(time.perf_counter() - began)
    return times
