"""Who goes on next on a busy event loop: those that have waited longest, a few in each of its turns."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class Turns:
    """Wakes futures in the order in which they asked, at most ``per_turn`` in one turn of the event loop.

    So the loop does everything else between two groups, however many wait. ``clock`` is in monotonic seconds.
    """

    def __init__(self, per_turn: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_turn = per_turn
        self._clock = clock
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._scheduled = False

    @property
    def lag_s(self) -> float:
        """For how long the first has waited; 0 if none waits."""
        return max(self._clock() - self._waiting[0][0], 0.0) if self._waiting else 0.0

    def wake(self, future: asyncio.Future[None]) -> None:
        """Give ``future``, which is waited for, its result when its turn has come."""
        self._waiting.append((self._clock(), future))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        waiting = self._waiting
        for _ in range(min(self._per_turn, len(waiting))):
            _, future = waiting.popleft()
            if not future.done():  # whoever waited for it may have left
                future.set_result(None)
        self._scheduled = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._turn)
