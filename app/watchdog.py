"""Notices an engine that has work but makes no progress: its thread is stuck in a step for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from app.channel.channel_hub import ChannelHub
from app.channel.silence import Silence
from engine.stats import EngineStats

LOOK_S = 0.5

FIRST_STEP = 6.0
"""Until the first step has ended, which may compile kernels, the limit is this many times as long."""

SLOW_STEPS = 3.0
"""An engine is not stuck before it has taken this many times as long as its last step, all layers of it."""


class WatchedEngine(Protocol):
    """The part of ``EngineThread`` that this uses."""

    def progress(self) -> tuple[int, int] | None:
        """What changes while it works; ``None`` while it is idle."""

    def stats(self) -> EngineStats:
        """The last snapshot."""

    def is_alive(self) -> bool:
        """Whether its thread runs."""


class Watchdog:
    """Belongs to one engine replica; runs on its event loop.

    Progress is a turn of the engine's loop or a layer within a step, so a long step is not taken for a stuck
    one. While there is none, the load reports say for how long, and ingresses send nothing new. After
    ``stuck_after_s``, or longer while steps are slow, ``stuck`` is set for good and every channel ends: the
    requests move, and the replica must be replaced.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        hub: ChannelHub,
        stuck_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stuck = ""  # why, once it is
        self._engine = engine
        self._hub = hub
        self.stuck_after_s = stuck_after_s
        self._silence = Silence(LOOK_S, clock)
        self._looks = 0

    def look(self) -> None:
        """Judge once; called every ``LOOK_S`` seconds."""
        self._looks += 1
        progress = self._engine.progress()
        # An idle engine makes progress by definition.
        seconds = self._silence.look(progress if progress is not None else self._looks)
        self._hub.on_stall(seconds)
        if seconds > self.limit_s() and not self.stuck:
            self.stuck = f"the engine's thread is stuck: no progress in a step for {seconds:.1f} s"
            self._hub.close_all(self.stuck)

    def limit_s(self) -> float:
        """Seconds without progress after which the engine is stuck."""
        stats = self._engine.stats()
        if not stats.steps:
            return FIRST_STEP * self.stuck_after_s
        return max(self.stuck_after_s, SLOW_STEPS * stats.step_seconds)

    async def run(self) -> None:
        """Look until the engine is stuck or has ended."""
        while self._engine.is_alive() and not self.stuck:
            self.look()
            await asyncio.sleep(LOOK_S)
