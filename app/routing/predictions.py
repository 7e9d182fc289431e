"""How well the router knows what replicas have cached: predicted against actual cached tokens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

RECENT = 128
"""Requests over which the error is looked at."""

TOLERATED = 0.2
"""Largest error, as a share of what was predicted or found, that is attributed to events on their way."""

WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PredictionCounters:
    """Totals since the start; tokens of prompts at first admission."""

    requests: int = 0
    predicted: int = 0
    actual: int = 0
    error: int = 0  # sum of the differences, without their signs


class Predictions:
    """Counts each routed request once, and warns when predictions and actual hits differ.

    They differ for a while after a burst, because events are on their way. They differ permanently if the two
    ends give the same blocks different keys. Routing by prefix would then be random, and nothing else would
    show it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = PredictionCounters()
        self._clock = clock
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
        self._logged_at = float("-inf")

    def count(self, predicted: int, actual: int) -> None:
        """A request whose replica was predicted to have ``predicted`` of its tokens had ``actual``."""
        counters = self.counters
        counters.requests += 1
        counters.predicted += predicted
        counters.actual += actual
        counters.error += abs(predicted - actual)
        self._recent.append((predicted, actual))
        if len(self._recent) == RECENT and self.error > TOLERATED:
            self._warn()

    @property
    def error(self) -> float:
        """The error of recent predictions: summed differences over the summed larger ones of both; 0 to 1."""
        largest = sum(max(pair) for pair in self._recent)
        return sum(abs(predicted - actual) for predicted, actual in self._recent) / largest if largest else 0.0

    def _warn(self) -> None:
        now = self._clock()
        if now - self._logged_at < WARN_EVERY_S:
            return
        self._logged_at = now
        predicted, actual = (sum(values) for values in zip(*self._recent, strict=True))
        logger.warning(
            "for the last %d requests, the router expected %d tokens in prefix caches, but engines found %d: "
            "the difference is %.0f%%",
            RECENT,
            predicted,
            actual,
            100 * self.error,
        )
