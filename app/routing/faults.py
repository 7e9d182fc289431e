"""Defects that must fail no request: counted, and logged once a second."""

from __future__ import annotations

import logging
from collections.abc import Callable

LOG_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Faults:
    """Above 0 is a defect. ``clock`` is in monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self._clock = clock
        self._logged_at = float("-inf")

    def add(self) -> None:
        """Count the exception that is being handled."""
        self.count += 1
        now = self._clock()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.exception("choosing by prefixes failed (%d times so far); going by load alone", self.count)
