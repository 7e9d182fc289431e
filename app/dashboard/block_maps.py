"""Block maps of the replicas that someone looks at: asked for once for all viewers, twice a second at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.kv.block_map import BlockMap

EVERY_S = 0.5

_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


def digits(cells: bytes) -> str:
    """One decimal digit for each cell."""
    return cells.translate(_DIGITS).decode("ascii")


class BlockMaps:
    """Belongs to one ingress. ``ask`` asks a replica, by model and name."""

    def __init__(
        self, ask: Callable[[str, str], Awaitable[BlockMap]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: dict[tuple[str, str], tuple[float, asyncio.Task[BlockMap]]] = {}

    async def get(self, model: str, replica: str) -> BlockMap:
        """The replica's answer, at most ``EVERY_S`` old; raises what ``ask`` raises."""
        now, key = self._clock(), (model, replica)
        for other, (at, task) in list(self._asked.items()):
            if now - at >= EVERY_S and task.done():
                del self._asked[other]
        if key not in self._asked:
            task = asyncio.create_task(self._answer(key))
            task.add_done_callback(_look_at)
            self._asked[key] = now, task
        # A viewer that leaves takes nothing from the others.
        return await asyncio.shield(self._asked[key][1])

    async def _answer(self, key: tuple[str, str]) -> BlockMap:
        return await self._ask(*key)


def _look_at(task: asyncio.Task[BlockMap]) -> None:
    """All viewers may have left; without this the loop complains that nobody has looked at the error."""
    if not task.cancelled():
        task.exception()
