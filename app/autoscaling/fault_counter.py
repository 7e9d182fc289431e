"""Counts faults that must not stop the code in which they occur."""

from __future__ import annotations

import logging


class FaultCounter:
    """Counts exceptions; logs the first one, and then whenever their number has doubled.

    Not thread-safe: it belongs to one loop or thread.
    """

    def __init__(self, message: str, logger: logging.Logger) -> None:
        """``message`` says what failed and what happens instead."""
        self.count = 0
        self._message = message
        self._logger = logger

    def add(self) -> None:
        """Count the exception that is being handled."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            self._logger.exception("%s (%d times so far)", self._message, self.count)
