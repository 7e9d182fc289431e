"""Where requests wait for their turn to begin: what a begin costs must not add up to a pause of the loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets one request pass in each turn of the event loop, clients in turn; used on that loop.

    A begin takes a millisecond or more. Between two of them the loop serves what has begun, health checks and
    beats. A client that sends many requests at once does not hold up those of another one.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, whose turn is next first
        self._closed = False  # somebody has passed in this turn

    async def enter(self, client: str) -> None:
        """Wait for a turn; return at once if this one is free and nobody waits."""
        loop = asyncio.get_running_loop()
        if not self._closed:
            self._closed = True
            loop.call_soon(self._turn)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _turn(self) -> None:
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            del self._waiting[client]
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            if not turn.done():  # its client may have left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._turn)
                return
        self._closed = False
