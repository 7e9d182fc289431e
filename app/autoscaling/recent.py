"""Recent amounts: how much per second, and how much the rate usually rises."""

from __future__ import annotations

import math
from collections import deque

_MEMORY_S = 300.0
"""Older rises count less and less."""


class Recent:
    """An amount that arrives over time, or a level, in windows of equal width.

    ``rise`` is how much the rate usually rises from one window to the next: the root mean square, with falls
    counted as zero. For a rate that varies around its mean, this is the standard deviation; a trend adds to it.
    """

    def __init__(self) -> None:
        self.rise = 0.0
        self._amounts: deque[tuple[float, float]] = deque()  # (time, what came since the one before)
        self._learning_since = math.inf

    def add(self, now: float, amount: float, width_s: float) -> None:
        """Add the amount since the last call; two windows of ``width_s`` are kept."""
        amounts, start = self._amounts, now - 2.0 * width_s
        before = amounts[-1][0] if amounts else now
        amounts.append((now, amount))
        while len(amounts) > 1 and amounts[1][0] <= start:
            amounts.popleft()
        if amounts[0][0] > start:
            return
        self._learning_since = min(self._learning_since, before)
        rise = max(self.rate(now, width_s) - self.rate(now - width_s, width_s), 0.0)
        memory = min(max(now - self._learning_since, width_s), _MEMORY_S)
        share = min((now - before) / memory, 1.0)
        self.rise = math.sqrt((1.0 - share) * self.rise**2 + share * rise**2)

    def add_level(self, now: float, level: float, width_s: float) -> None:
        """Add the level since the last call; the rate is then the mean level."""
        self.add(now, level * (now - self._amounts[-1][0]) if self._amounts else 0.0, width_s)

    def rate(self, end: float, width_s: float) -> float:
        """The amount per second in the window that ends now; 0 if the window has fewer than two entries."""
        total, since, until = 0.0, end, -math.inf
        for time, amount in reversed(self._amounts):
            if time < end - width_s:
                break
            if time <= end:
                since, oldest, until = time, amount, max(until, time)
                total += amount
        return (total - oldest) / (until - since) if since < until else 0.0
