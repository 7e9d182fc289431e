"""Requests on replicas that have been cordoned for long go on elsewhere."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection

from app.routing.fleet import Fleet

AFTER_S = 5.0
"""A request that is on a cordoned replica for this long moves: most have ended by themselves by then."""

LOOK_EVERY_S = 0.25


class HandOver:
    """Lives on the ingress's event loop; ``move_away`` runs the requests of these replicas again elsewhere.

    Nothing moves while no other replica can take it: a cordon never ends a request.
    """

    def __init__(self, fleet: Fleet, move_away: Callable[[Collection[str]], None]) -> None:
        self._fleet = fleet
        self._move_away = move_away
        self._after_s = AFTER_S
        self._task: asyncio.Task[None] | None = None

    def cordon(self, replicas: Collection[str], lasts_s: float, after_s: float = AFTER_S) -> None:
        """Exactly ``replicas`` get no new requests for ``lasts_s``, and lose theirs after ``after_s``.

        Raises:
            ValueError: a time is negative or not a number.
        """
        if not after_s >= 0:
            raise ValueError(f"requests cannot be handed over after {after_s} s; 0 or more can be told")
        self._fleet.cordon.set(replicas, lasts_s)
        self._after_s = after_s
        if self._task is None or self._task.done():
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._watch(), context=contextvars.Context())

    def stop(self) -> None:
        """Move nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while held := self._fleet.cordon.names():
            long = self._fleet.cordon.longer_than(self._after_s)
            if long and self._fleet.ledger.routable(self._fleet.members - held):
                self._move_away(long)
            await asyncio.sleep(LOOK_EVERY_S)
