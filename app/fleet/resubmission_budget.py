"""How many requests one ingress may send again: a fault must not multiply the load that may have caused it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

SHARE = 0.2
"""Resubmissions for each submission."""

FLOOR = 64.0
"""Resubmissions that are always possible within ``REFILL_S``, in addition to one of each live request."""

REFILL_S = 60.0

LOOK_S = 0.25


class ResubmissionBudget:
    """A token bucket, used on one event loop.

    Full, it has one resubmission for each live request and ``FLOOR`` more, so that all requests of lost
    replicas move at once. It refills within ``REFILL_S``, and by ``SHARE`` with each submission. Beyond it
    requests wait, each for random times. ``num_live`` returns the live requests; ``clock`` is in monotonic
    seconds.
    """

    def __init__(
        self,
        num_live: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._num_live = num_live
        self._clock = clock
        self._rng = rng or random.Random()
        self._spent = 0.0
        self._at = clock()
        self.resubmitted = 0
        self.waiting = 0
        """Requests that wait for the budget now."""

    def submitted(self) -> None:
        """A request was sent for the first time."""
        self._spent = max(self._spent - SHARE, 0.0)

    async def take(self) -> None:
        """Return when one more request may be sent again."""
        if not self._take():
            self.waiting += 1
            try:
                while not self._take():  # noqa: ASYNC110  (time fills the bucket)
                    await asyncio.sleep(LOOK_S * self._rng.uniform(0.5, 1.5))
            finally:
                self.waiting -= 1
        self.resubmitted += 1

    def _take(self) -> bool:
        size, now = FLOOR + self._num_live(), self._clock()
        past, self._at = now - self._at, now
        self._spent = max(self._spent - size * past / REFILL_S, 0.0)
        if self._spent + 1.0 > size:
            return False
        self._spent += 1.0
        return True
