"""What a whole fleet has counted, wherever one asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from app.metrics.exposition import render, render_keys
from app.metrics.samples import Process, Samples, unpack

KEPT_S = 1.0
"""An answer is given again for this long, so that frequent scrapes cost no more than one a second."""


async def _none() -> list[Process]:
    return []


async def _no_scaling() -> Samples:
    return {}


class FleetFigures:
    """Belongs to one ingress; any of them gives the same answer.

    ``own`` are this ingress's figures. ``engines`` has the last figures of each replica, which come over its
    channel: each engine sends all ingresses the same. ``others`` asks the other ingresses for theirs, and
    ``scaling`` for the policy's. Each process appears once, under its own name, so sums over the label
    ``replica`` count nothing twice.
    """

    def __init__(
        self,
        model: str,
        own: Callable[[], Process],
        engines: Callable[[], Mapping[str, Sequence[float]]] = dict,
        others: Callable[[], Awaitable[list[Process]]] = _none,
        scaling: Callable[[], Awaitable[Samples]] = _no_scaling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._own = own
        self._engines = engines
        self._others = others
        self._scaling = scaling
        self._clock = clock
        self._lock = asyncio.Lock()
        self._seen: list[Process] = []
        self._text = b""
        self._text_at = -KEPT_S
        self._of_keys: dict[str | None, bytes] = {}  # as asked for since then

    async def processes(self) -> list[Process]:
        """Every process of the fleet, this one first."""
        others, scaling = await asyncio.gather(self._others(), self._scaling())
        own = self._own()
        engines = await asyncio.to_thread(_unpacked, dict(self._engines()))
        siblings = [process for process in others if process.name != own.name]
        return [own, *siblings, *engines, *([Process("", scaling)] if scaling else [])]

    async def text(self, key: str | None = None) -> bytes:
        """In Prometheus's format; of what is counted by API key, that of ``key`` alone, or without it, all.

        It is made in a thread: with many replicas, or keys, that takes a while.
        """
        async with self._lock:
            if self._clock() - self._text_at >= KEPT_S:
                self._seen = await self.processes()
                self._text = await asyncio.to_thread(render, self._model, self._seen)
                self._of_keys.clear()
                self._text_at = self._clock()
            found = self._of_keys.get(key)
            if found is None:
                found = await asyncio.to_thread(render_keys, self._model, self._seen, key)
                self._of_keys[key] = found
            return self._text + found


def _unpacked(engines: Mapping[str, Sequence[float]]) -> list[Process]:
    """0.1 ms each."""
    return [Process(name, unpack(numbers)) for name, numbers in engines.items()]
