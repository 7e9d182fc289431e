"""Overload control: new requests are refused while the wait would be too long even with all replicas.

A refusal costs nothing and says when to try again. An admitted request that waits for a minute takes memory,
and its client may leave before it runs. A short burst is admitted in full: requests are refused only after
the wait has exceeded the limit for as long as the limit itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

from app.autoscaling.fault_counter import FaultCounter
from app.background import Background
from app.fleet.ingress_lag import IngressLag
from app.fleet.refusal import Refusal, retry_after_s
from app.routing.waiting import ExpectedWait

EVERY_S = 0.05
"""The expected wait is updated at most this often when requests arrive."""

WATCH_S = 0.25
"""Without requests it is updated this often, so that an overload can end and the estimate falls."""

logger = logging.getLogger(__name__)


class OverloadControl:
    """Owned by one ingress replica, used on its event loop.

    ``expected`` returns how long a new request would wait now, and on how many replicas; if it returns ``None``
    or raises, requests are admitted. With an infinite ``max_wait_s`` none is refused. While there are fewer
    than ``max_replicas``, the wait is scaled to that number and may be ``startup_s`` longer, since the others
    may be starting. An ingress that does not keep up, by its ``lag``, takes no new requests, whatever
    ``max_wait_s`` is. ``clock`` is in monotonic seconds.

    An *overload* begins when the wait has exceeded the limit for ``max_wait_s`` without a break, and ends when
    it has been within the limit for as long. During an overload requests are refused while the wait exceeds the
    limit and admitted while it does not: a moment of relief does not admit another burst.
    """

    def __init__(
        self,
        expected: Callable[[], ExpectedWait | None] = lambda: None,
        *,
        max_wait_s: float = math.inf,
        max_replicas: int = 1,
        startup_s: float = 0.0,
        lag: IngressLag | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._expected = expected
        self._max_wait_s = max_wait_s
        self._max_replicas = max_replicas
        self._startup_s = startup_s
        self._lag = lag or IngressLag()
        self._clock = clock
        self._rng = rng or random.Random()
        self._looked_at = -math.inf
        self._wait_s: float | None = None
        self._scaled_s = 0.0
        self._limit_s = max_wait_s
        self._granted_s = 0.0
        self._over = False
        self._since = -math.inf  # the wait has been over the limit, or within it
        self._overloaded = False
        self._watching: asyncio.Task[None] | None = None
        self._refused = 0
        self._faults = FaultCounter("the expected wait could not be estimated; admitting all requests", logger)

    def configure(self, max_wait_s: float) -> None:
        """Change the limit; see the class."""
        self._max_wait_s = max_wait_s

    def refusal(self, share: Callable[[], float] = lambda: 1.0) -> Refusal | None:
        """The refusal for a new request; ``None`` admits it.

        ``share`` returns the part of the queue that is ahead of the request, between 0 and 1, because engines
        serve clients in fair shares.
        """
        behind = self._lag.refusal()
        if behind is not None:
            self._refused += 1
            return behind
        if self._clock() - self._looked_at >= EVERY_S:
            self.update()
        if not self._overloaded:
            return None
        wait = self._scaled_s * share()
        if wait <= self._limit_s:
            return None
        self._refused += 1
        return Refusal(wait, self._limit_s, self.retry_after_s(), self._granted_s)

    @property
    def refusing(self) -> bool:
        """Whether a new request, or that of some clients, would be refused now."""
        return self._lag.behind or (self._overloaded and self._over)

    def retry_after_s(self) -> int:
        """Seconds until the wait should be within the limit, or over if there is none; see ``refusal.py``."""
        limit_s = self._limit_s if math.isfinite(self._limit_s) else 0.0
        return retry_after_s(self._scaled_s - limit_s, self._rng)

    def update(self) -> None:
        """Update the expected wait."""
        now = self._looked_at = self._clock()
        expected = self._ask()
        replicas = expected.replicas if expected is not None else 0
        self._wait_s = expected.seconds if expected is not None else None
        self._scaled_s = (self._wait_s or 0.0) * min(replicas / self._max_replicas, 1.0)
        self._granted_s = self._startup_s if replicas < self._max_replicas else 0.0
        self._limit_s = self._max_wait_s + self._granted_s
        over = self._scaled_s > self._limit_s
        if over is not self._over:
            self._over, self._since = over, now
        if now - self._since >= self._max_wait_s and over is not self._overloaded:
            self._overloaded = over
            logger.warning(
                "the expected wait is %.1f s with %d replicas, the limit %.1f s: %s",
                self._scaled_s,
                self._max_replicas,
                self._limit_s,
                "an overload has begun" if over else "the overload is over",
            )

    def start(self, background: Background) -> None:
        """Begin to update a few times a second; later calls do nothing."""
        if self._watching is None:
            self._watching = background.start("overload control", self._watch())

    def stop(self) -> None:
        """End what ``start`` began."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            if self._clock() - self._looked_at >= EVERY_S:
                self.update()
            await asyncio.sleep(WATCH_S)

    def inspect(self) -> dict[str, Any]:
        """For tests and debugging: ``faults`` above 0 are a defect; ``expected_wait_s`` is not scaled."""
        return {
            "expected_wait_s": self._wait_s,
            "limit_s": self._limit_s,
            "overloaded": self._overloaded,
            "refusing": self.refusing,
            "lag_s": self._lag.seconds,
            "behind": self._lag.behind,
            "refused": self._refused,
            "faults": self._faults.count,
        }

    def _ask(self) -> ExpectedWait | None:
        try:
            expected = self._expected()
            if expected is not None and math.isnan(expected.seconds):
                raise ValueError("the expected wait is not a number")
            return expected
        except Exception:  # noqa: BLE001  (a defect in the estimate must not refuse requests)
            self._faults.add()
            return None
