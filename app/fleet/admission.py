"""Whether an ingress takes a new request: not while the fleet at its largest would let it wait too long.

A refusal costs nothing and says when to come again; a request that is taken and waits for a minute costs memory
here, and its client has gone by the time that it runs. A short burst is taken whole: only waits that stay over
the limit for as long as the limit itself close the door.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from app.metrics import AdmissionMetrics
from app.routing.waiting import ExpectedWait

EVERY_S = 0.05
"""The wait is looked at again after so long, when a request comes."""

WATCH_S = 0.25
"""And after so long without requests: a break must be seen, and the gauge go down."""

LONGEST_BASE_S, LONGEST_RETRY_S = 40, 60
"""Seconds of ``Retry-After`` before and with what is added at random. OpenAI's clients honour up to 120."""

logger = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why a request is not taken: ``wait_s`` with all replicas that there may be is over ``limit_s``.

    ``startup_s`` is the part of the limit that replicas are granted to start.
    """

    wait_s: float
    limit_s: float
    retry_after_s: int
    startup_s: float = 0.0


class Admission:
    """Owned by one ingress replica, used on its event loop.

    ``expected`` says how long a new request would wait now and on how many replicas; ``None``, or an error of
    its own, admits. With ``longest_wait_s`` infinite nobody is refused. While there are fewer than
    ``most_replicas``, the wait is scaled to these and may be ``startup_s`` longer: they may be on their way.
    ``clock`` is in monotonic seconds.

    A wait that has been over the limit for ``longest_wait_s`` without a break begins an *overload*, and one
    that has been within it for as long ends it. In an overload requests are refused while the wait is over the
    limit and taken while it is not, so that the grace for bursts does not come back with each moment of relief.
    """

    def __init__(
        self,
        expected: Callable[[], ExpectedWait | None] = lambda: None,
        *,
        longest_wait_s: float = math.inf,
        most_replicas: int = 1,
        startup_s: float = 0.0,
        metrics: AdmissionMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._expected = expected
        self._longest_wait_s = longest_wait_s
        self._most_replicas = most_replicas
        self._startup_s = startup_s
        self._metrics = metrics
        self._clock = clock
        self._rng = rng or random.Random()
        self._looked_at = -math.inf
        self._wait_s: float | None = None
        self._scaled_s = 0.0
        self._limit_s = longest_wait_s
        self._granted_s = 0.0
        self._over = False
        self._since = -math.inf  # the wait has been over the limit, or within it
        self._overloaded = False
        self._watching: asyncio.Task[None] | None = None
        self._refused = 0
        self._faults = 0
        self._said_at = -math.inf

    def refusal(self) -> Refusal | None:
        """What a new request gets; ``None`` admits it."""
        if self._clock() - self._looked_at >= EVERY_S:
            self.look()
        if not (self._overloaded and self._over):
            return None
        self._refused += 1
        return Refusal(self._scaled_s, self._limit_s, self.retry_after_s(), self._granted_s)

    def retry_after_s(self) -> int:
        """Whole seconds until the wait should be within the limit, or over if there is no limit; at least 1.

        Up to half of it is added at random, each time anew: refused requests come in packs, and would come back
        in one second. It is not a client's own, since one client may be the pack.
        """
        allowed = self._limit_s if math.isfinite(self._limit_s) else 0.0
        base = min(max(math.ceil(min(self._scaled_s - allowed, LONGEST_BASE_S)), 1), LONGEST_BASE_S)
        return min(base + self._rng.randint(0, max(base // 2, 1)), LONGEST_RETRY_S)

    def look(self) -> None:
        """Take in the wait as it is now."""
        now = self._looked_at = self._clock()
        expected = self._ask()
        replicas = expected.replicas if expected is not None else 0
        self._wait_s = expected.seconds if expected is not None else None
        self._scaled_s = (self._wait_s or 0.0) * min(replicas / self._most_replicas, 1.0)
        self._granted_s = self._startup_s if replicas < self._most_replicas else 0.0
        self._limit_s = self._longest_wait_s + self._granted_s
        over = self._scaled_s > self._limit_s
        if over is not self._over:
            self._over, self._since = over, now
        if now - self._since >= self._longest_wait_s and over is not self._overloaded:
            self._overloaded = over
            logger.warning(
                "the expected wait of a new request is %.1f s with %d replicas, the limit %.1f s: %s",
                self._scaled_s,
                self._most_replicas,
                self._limit_s,
                "an overload has begun" if over else "the overload is over",
            )

    def start(self) -> None:
        """Look a few times a second from now on, and publish; later calls do nothing."""
        if self._watching is None:
            # An empty context: Serve must not take this for a part of the call that it began in.
            watch = asyncio.get_running_loop().create_task(self._watch(), context=contextvars.Context())
            watch.add_done_callback(_watch_ended)
            self._watching = watch

    def stop(self) -> None:
        """End what ``start`` began."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            if self._clock() - self._looked_at >= EVERY_S:
                self.look()
            if self._metrics is not None:
                self._metrics.update(self._wait_s or 0.0, self._refused)
            await asyncio.sleep(WATCH_S)

    def inspect(self) -> dict[str, Any]:
        """For tests and debugging: ``faults`` above 0 are a defect; ``expected_wait_s`` is not scaled."""
        return {
            "expected_wait_s": self._wait_s,
            "limit_s": self._limit_s,
            "overloaded": self._overloaded,
            "refusing": self._overloaded and self._over,
            "refused": self._refused,
            "faults": self._faults,
        }

    def _ask(self) -> ExpectedWait | None:
        try:
            expected = self._expected()
            if expected is not None and math.isnan(expected.seconds):
                raise ValueError("the expected wait is not a number")
            return expected
        except Exception:  # whatever is wrong with the estimate, requests can be served
            self._faults += 1
            if self._looked_at - self._said_at >= 1.0:
                self._said_at = self._looked_at
                logger.exception(
                    "the expected wait is not known (%d times so far); admitting all", self._faults
                )
            return None


def _watch_ended(watch: asyncio.Task[None]) -> None:
    error = None if watch.cancelled() else watch.exception()
    if error is not None:
        logger.error("the expected wait is looked at by requests alone from now on", exc_info=error)
