"""The live page's events: made once a second for all viewers together, and only while there are any."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from app.background import start_task
from app.dashboard.fleet_view import Moment, view
from app.metrics.samples import Process

EVERY_S = 1.0

FIRST_S = 0.2
"""Between the first two looks, of which the first shows nothing: a rate takes two."""

SHARE = 0.01
"""Of a processor, which looking may take: a large fleet is looked at less often."""

OVER_S = 15.0
"""Rates and percentiles cover this many seconds."""

HISTORY = 600
"""Points that a new viewer gets."""

MAX_VIEWERS = 32
"""Of which those of one key may be as many as they leave free."""

STREAM_S = 30.0
"""A browser opens the stream again after so long: an open one would hold up the end of its ingress."""


class LiveFeed:
    """Belongs to one ingress. ``processes`` are the whole fleet.

    ``states`` are of the channels to engines, for each model that there is.
    """

    def __init__(
        self,
        processes: Callable[[], Awaitable[list[Process]]],
        states: Callable[[], Mapping[str, Mapping[str, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._states = states
        self._clock = clock
        self._moments: deque[tuple[float, dict[str, Moment]]] = deque()  # when, and what each model had
        self._history: dict[str, deque[dict[str, float | None]]] = {}
        self._last: dict[str, bytes] | None = None  # of each model, in JSON
        self._last_at = 0.0
        self._news: asyncio.Future[None] | None = None  # done at the next event
        self._task: asyncio.Task[None] | None = None
        self.viewers = 0
        self.of_keys: Counter[str] = Counter()  # viewers

    def has_place(self, key: str) -> bool:
        """Whether another viewer of ``key`` may come: a key may have as many as it leaves free."""
        free = MAX_VIEWERS - self.viewers - 1
        return free >= (self.of_keys[key] + 1 if key else 0)

    async def events(
        self, key: str = "", may_see: Callable[[str], bool] = lambda model: True
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer: the history, then the fleet about once a second.

        They tell of the models that it ``may_see``. A viewer that reads slowly misses some.
        """
        self.viewers += 1
        self.of_keys[key] += 1
        try:
            if self._task is None or self._task.done():
                self._news = asyncio.get_running_loop().create_future()
                self._task = start_task("live page", self._run(), lambda _: None)
            yield b"retry: 500\n\n" + _event(
                "history", {model: list(points) for model, points in self._history.items() if may_see(model)}
            )
            until, sent = self._clock() + STREAM_S, None
            while self._clock() < until and not self._task.done():
                if self._last is not None and self._last is not sent:
                    sent = self._last
                    models = b",".join(found for model, found in sent.items() if may_see(model))
                    yield b'event: fleet\ndata: {"at":%r,"models":{%b}}\n\n' % (self._last_at, models)
                elif self._news is not None:
                    await asyncio.wait((self._news, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.viewers -= 1
            self.of_keys -= Counter((key,))  # which drops what is 0

    async def _run(self) -> None:
        try:
            while self.viewers:
                first = not self._moments
                took_s = await self._look()
                await asyncio.sleep(max(FIRST_S if first else EVERY_S, took_s / SHARE))
        finally:
            self._moments.clear()
            self._last = None

    async def _look(self) -> float:
        """Make one event, but for the first look; returns for how many seconds it kept the loop."""
        processes = await self._processes()
        at, states = self._clock(), self._states()
        now = {
            model: Moment.of(at, (process for process in processes if process.model == model))
            for model in states
        }
        self._moments.append((at, now))
        if len(self._moments) == 1:
            return self._clock() - at
        while len(self._moments) > 2 and self._moments[1][0] <= at - OVER_S:
            self._moments.popleft()
        _, before = self._moments[0]
        models = {
            model: view(before.get(model, moment), moment, states[model]) for model, moment in now.items()
        }
        self._last_at = round(time.time(), 1)
        for model, of_model in models.items():
            points = self._history.setdefault(model, deque(maxlen=HISTORY))
            points.append({"at": self._last_at, **_point(of_model)})
        self._last = {model: f"{_json(model)}:{_json(of_model)}".encode() for model, of_model in models.items()}
        if self._news is not None:
            self._news.set_result(None)
        self._news = asyncio.get_running_loop().create_future()
        return self._clock() - at


def _point(shown: Mapping[str, Any]) -> dict[str, float | None]:
    """What the page draws over time."""
    fleet, scaling, latency = shown["fleet"], shown["scaling"], shown["latency"]
    return {
        "pool": fleet["pool"],
        "demand": fleet["demand"],
        "tokens_s": fleet["tokens_s"],
        "replicas": len(shown["replicas"]),
        "target": None if scaling is None else scaling["target"],
        "first_token": latency["first_token"]["p95"],
        "inter_token": latency["inter_token"]["p95"],
    }


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {_json(data)}\n\n".encode()


def _json(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))
