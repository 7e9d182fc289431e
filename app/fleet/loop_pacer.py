"""Who continues next on a busy event loop: a few per turn, clients round robin, first come, first served."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial


class LoopPacer:
    """Continues waiters, at most ``per_turn`` in ``every`` turns of the event loop, on which it is used.

    So the loop does all other work between two groups, however many wait. Clients are served round robin, so
    one with many waiting requests delays no other; each client's requests are served first come, first served.
    ``clock`` is in monotonic seconds.
    """

    def __init__(self, per_turn: int, clock: Callable[[], float] = time.monotonic, *, every: int = 1) -> None:
        self._per_turn = per_turn
        self._every = every
        self._clock = clock
        # By client, the next one first: since when each has waited, and what continues it.
        self._waiting: dict[str, deque[tuple[float, Callable[[], bool]]]] = {}
        # The loop whose current turn, or ``every`` turns, is taken. One that ended in between takes no other's.
        self._taken_on: asyncio.AbstractEventLoop | None = None

    @property
    def lag_s(self) -> float:
        """The longest that any has waited; 0 if none waits."""
        return max(map(self.waited_s, self._waiting), default=0.0)

    def waited_s(self, client: str) -> float:
        """The longest that any of ``client`` has waited; 0 if none does."""
        queue = self._waiting.get(client)
        return max(self._clock() - queue[0][0], 0.0) if queue else 0.0

    def call(self, resume: Callable[[], bool], loop: asyncio.AbstractEventLoop, client: str = "") -> None:
        """Call ``resume`` on ``loop`` when its turn has come.

        It must not raise. It returns whether the waiter was still there; if not, the turn passes to the next.
        """
        queue = self._waiting.get(client)
        if queue is None:
            queue = self._waiting[client] = deque()
        queue.append((self._clock(), resume))
        self._take(loop)

    async def enter(self, client: str) -> None:
        """Wait for a turn; if the current one is free, take it and return at once."""
        loop = asyncio.get_running_loop()
        if self._taken_on is not loop:
            self._take(loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self.call(partial(_grant, turn), loop, client)
        await turn

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._taken_on is not loop:
            self._taken_on = loop
            loop.call_soon(self._turn, loop, self._every)

    def _turn(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left > 1:
            loop.call_soon(self._turn, loop, left - 1)
            return
        self._taken_on = None
        woken, waiting = 0, self._waiting
        try:
            while waiting and woken < self._per_turn:
                client, queue = next(iter(waiting.items()))
                del waiting[client]
                _, resume = queue.popleft()
                if queue:
                    waiting[client] = queue  # behind the others
                woken += resume()
        finally:  # whatever became of one, the others have their turns
            if woken or waiting:
                self._take(loop)


def _grant(turn: asyncio.Future[None]) -> bool:
    if turn.done():  # its waiter has left
        return False
    turn.set_result(None)
    return True
