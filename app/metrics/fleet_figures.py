"""What a whole fleet has counted, wherever one asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from app.metrics.exposition import render, render_keys
from app.metrics.samples import Process, Samples, unpack

KEPT_S = 1.0
"""An answer is given again for this long, so that frequent scrapes cost no more than one a second."""


async def nobody() -> list[Process]:
    """There are no other ingresses."""
    return []


async def _no_scaling() -> Samples:
    return {}


class ModelFigures(NamedTuple):
    """The sources of one model's figures at one ingress.

    ``own`` are this ingress's. ``engines`` has the last figures of each replica, which come over its channel:
    each engine sends all its ingresses the same. Those of replicas without a channel to this ingress come from
    others. ``scaling`` asks for the policy's.
    """

    model: str
    own: Callable[[], Process]
    engines: Callable[[], Mapping[str, Sequence[float]]] = dict
    scaling: Callable[[], Awaitable[Samples]] = _no_scaling


class FleetFigures:
    """Belongs to one ingress; any of them gives the same answer.

    ``others`` asks the other ingresses for theirs. Each process appears once for a model, under its own name,
    so sums over the label ``replica`` count nothing twice.
    """

    def __init__(
        self,
        models: Sequence[ModelFigures],
        others: Callable[[], Awaitable[list[Process]]] = nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._others = others
        self._clock = clock
        self._lock = asyncio.Lock()
        self._seen: list[Process] = []
        self._seen_at = -KEPT_S
        # As asked for since then: of all models or some, and what keys have used of them.
        self._texts: dict[frozenset[str] | None, bytes] = {}
        self._of_keys: dict[tuple[str | None, frozenset[str] | None], bytes] = {}

    async def processes(self) -> list[Process]:
        """Every process of the fleet, this one first."""
        models = tuple(self._models)
        others, scaling = await asyncio.gather(
            self._others(), asyncio.gather(*(model.scaling() for model in models))
        )
        own = [model.own() for model in models]
        packed = {model.model: dict(model.engines()) for model in models}
        engines = await asyncio.to_thread(unpacked, packed)
        known = {(process.name, process.model) for process in [*own, *engines]}
        # While a deploy rolls, two ingresses may report the same engine.
        told = {(process.name, process.model): process for process in others}
        siblings = [process for key, process in told.items() if key not in known]
        decisions = [
            Process("", found, model.model) for model, found in zip(models, scaling, strict=True) if found
        ]
        return [*own, *siblings, *engines, *decisions]

    async def text(self, key: str | None = None, models: frozenset[str] | None = None) -> bytes:
        """The figures in Prometheus's format; of those by API key, only ``key``'s, or all without it.

        ``models`` are those whose figures are told; by default all.

        It is made in a thread: with many replicas, or keys, that takes a while.
        """
        async with self._lock:
            if self._clock() - self._seen_at >= KEPT_S:
                self._seen = await self.processes()
                self._texts.clear()
                self._of_keys.clear()
                self._seen_at = self._clock()
            told = [process for process in self._seen if models is None or process.model in models]
            text = self._texts.get(models)
            if text is None:
                text = self._texts[models] = await asyncio.to_thread(render, told)
            found = self._of_keys.get((key, models))
            if found is None:
                found = self._of_keys[key, models] = await asyncio.to_thread(render_keys, told, key)
            return text + found


def unpacked(engines: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Process]:
    """The engines' figures, by model and replica, as they come over channels. Takes 0.1 ms for each engine."""
    return [
        Process(name, unpack(numbers), model)
        for model, replicas in engines.items()
        for name, numbers in replicas.items()
    ]
