"""How far an ingress is behind; while it is behind, it accepts no new requests."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

from app.background import Background
from app.fleet.loop_lag import HOLD_S, LoopLag
from app.fleet.refusal import Refusal, retry_after_s

LOOK_EVERY_S = 0.25
"""How often the lag is judged."""

logger = logging.getLogger(__name__)


class IngressLag:
    """One per ingress replica, used on its event loop.

    The ingress is behind if, for a while, its loop has been late, or messages from engines have waited
    (``watch_frames``), by more than ``limit_s``. It then refuses all new requests. ``begin_wait_s`` returns the
    longest time that a request has waited here to start; if that is too long, the ingress refuses requests of
    the clients whose requests wait that long. ``clock`` is in monotonic seconds.
    """

    def __init__(
        self,
        limit_s: float = math.inf,
        begin_wait_s: Callable[[], float] = lambda: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._begin_wait_s = begin_wait_s
        self._frames: list[Callable[[], float]] = []
        self._loop = LoopLag(limit_s)
        self._begins = LoopLag(limit_s)
        self._clock = clock
        self._rng = rng or random.Random()
        self._watching: asyncio.Task[None] | None = None
        self._refused = 0

    def watch_frames(self, waited_s: Callable[[], float]) -> None:
        """Also watch ``waited_s``, which returns how long messages of some engines have waited here."""
        self._frames.append(waited_s)

    @property
    def limit_s(self) -> float:
        """Of either lag."""
        return self._loop.limit_s

    @limit_s.setter
    def limit_s(self, limit_s: float) -> None:
        self._loop.limit_s = self._begins.limit_s = limit_s

    def refusal(self) -> Refusal | None:
        """The refusal for a new request of any client; ``None`` admits it."""
        return self._refusal(self._loop.seconds) if self._loop.behind else None

    def begin_refusal(self, waited_s: float) -> Refusal | None:
        """The refusal for a request of a client whose requests wait ``waited_s`` to begin; ``None`` admits it.

        So a client that sends many is refused, and others, which hardly wait, are not.
        """
        if not self._begins.behind or waited_s <= self.limit_s:
            return None
        return self._refusal(waited_s)

    def _refusal(self, lag_s: float) -> Refusal:
        self._refused += 1
        return Refusal(lag_s, self.limit_s, retry_after_s(lag_s + HOLD_S, self._rng), behind=True)

    @property
    def behind(self) -> bool:
        """Whether a new request, or that of some clients, would be refused now."""
        return self._loop.behind or self._begins.behind

    @property
    def seconds(self) -> float:
        """The longer of both lags at the last look."""
        return max(self._loop.seconds, self._begins.seconds)

    def look(self, late_s: float) -> None:
        """Judge whether this process keeps up; its loop is ``late_s`` late now."""
        frames_s = max((waited_s() for waited_s in self._frames), default=0.0)
        self._look(self._loop, max(late_s, frames_s), "all new requests are refused")
        self._look(self._begins, self._begin_wait_s(), "requests of clients that wait this long are refused")

    def _look(self, lag: LoopLag, seconds: float, consequence: str) -> None:
        was_behind = lag.behind
        lag.look(self._clock(), seconds)
        if lag.behind is not was_behind:
            logger.warning(
                "this ingress is %.1f s behind, the limit is %.1f s: %s",
                lag.seconds,
                lag.limit_s,
                consequence if lag.behind else "it has caught up",
            )

    def start(self, background: Background) -> None:
        """Begin to look a few times a second; later calls do nothing."""
        if self._watching is None:
            self._watching = background.start("lag", self._watch())

    def stop(self) -> None:
        """End what ``start`` began."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            due = self._clock() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(max(self._clock() - due, 0.0))

    def inspect(self) -> dict[str, Any]:
        """For tests and debugging."""
        return {"lag_s": self.seconds, "behind": self.behind, "refused": self._refused}
