"""Drains cordoned replicas: after a while their requests move to other replicas."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection

from app.routing.fleet import Fleet

DRAIN_AFTER_S = 5.0
"""By default a request moves once its replica has been cordoned for this long; most end before that."""

CHECK_EVERY_S = 0.25


class Drainer:
    """Runs on the ingress's event loop; ``move_away`` moves the requests of the given replicas.

    Nothing moves while no other replica is routable: a cordon never ends a request.
    """

    def __init__(self, fleet: Fleet, move_away: Callable[[Collection[str]], None]) -> None:
        self._fleet = fleet
        self._move_away = move_away
        self._after_s = DRAIN_AFTER_S
        self._task: asyncio.Task[None] | None = None

    def cordon(self, replicas: Collection[str], lasts_s: float, after_s: float = DRAIN_AFTER_S) -> None:
        """Cordon exactly ``replicas``: no new requests for ``lasts_s``; running ones move after ``after_s``.

        Raises:
            ValueError: a time is negative or not a number.
        """
        if not after_s >= 0:
            raise ValueError(f"after_s is {after_s} but must be at least 0")
        self._fleet.cordon.set(replicas, lasts_s)
        self._after_s = after_s
        if self._task is None or self._task.done():
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._watch(), context=contextvars.Context())

    def stop(self) -> None:
        """Stop moving requests."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while cordoned := self._fleet.cordon.names():
            due = self._fleet.cordon.longer_than(self._after_s)
            if due and self._fleet.ledger.routable(self._fleet.members - cordoned):
                self._move_away(due)
            await asyncio.sleep(CHECK_EVERY_S)
