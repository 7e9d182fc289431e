"""Block maps of the replicas that someone looks at: asked for once for all viewers, twice a second at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap

EVERY_S = 0.5

_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


def digits(cells: bytes) -> str:
    """One decimal digit for each cell."""
    return cells.translate(_DIGITS).decode("ascii")


def shown_names(found: BlockMap, tenant: str | None) -> list[str | None]:
    """The names of a map's groups; of requests, those of a ``tenant`` alone, unless that is ``None``."""
    if tenant is None or not found.tenants:
        return list(found.names)
    return [name if owner == tenant else None for name, owner in zip(found.names, found.tenants, strict=True)]


class BlockMaps:
    """Belongs to one ingress. ``ask`` asks a replica, by model and name, for one grouping of its cells."""

    def __init__(
        self,
        ask: Callable[[str, str, GroupBy], Awaitable[BlockMap]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: dict[tuple[str, str, GroupBy], tuple[float, asyncio.Task[BlockMap]]] = {}

    async def get(self, model: str, replica: str, by: GroupBy = GroupBy.STATE) -> BlockMap:
        """The replica's answer, at most ``EVERY_S`` old; raises what ``ask`` raises."""
        now, key = self._clock(), (model, replica, by)
        for other, (at, task) in list(self._asked.items()):
            if now - at >= EVERY_S and task.done():
                del self._asked[other]
        if key not in self._asked:
            task = asyncio.create_task(self._answer(key))
            task.add_done_callback(_look_at)
            self._asked[key] = now, task
        # A viewer that leaves takes nothing from the others.
        return await asyncio.shield(self._asked[key][1])

    async def _answer(self, key: tuple[str, str, GroupBy]) -> BlockMap:
        return await self._ask(*key)


def _look_at(task: asyncio.Task[BlockMap]) -> None:
    """All viewers may have left; without this the loop complains that nobody has looked at the error."""
    if not task.cancelled():
        task.exception()
