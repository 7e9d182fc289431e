"""Passes what the channels report from their thread to the owner's event loop, in order."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from app.autoscaling.fault_counter import FaultCounter
from app.channel import wire
from app.channel.channel_events import OwnerEvents
from app.channel.failures import describe
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import Figures, KvSection
from app.routing.ledger import Route
from app.routing.load import LoadReport

SLICE_S = 0.01
"""The owner's loop handles events for at most this long before it does other work."""

RECORDS = 256
"""Records of a frame that are handled as one event: in 2 ms."""

logger = logging.getLogger(__name__)


class Channels(Protocol):
    """What the relay tells the channels after the owner's answer. Called on the owner's loop."""

    def forget(self, route: Route, attempts: list[int]) -> None:
        """Have the engine abort these attempts, which the owner does not know."""

    def resync(self, route: Route) -> None:
        """Request a snapshot, because KV events are missing."""

    def fail(self, route: Route, reason: str) -> None:
        """End the channel, because the owner failed to handle an event."""

    def resume(self, route: Route, claims: Sequence[AttemptClaim]) -> None:
        """The channel has ended; these of its attempts are to continue on the next one."""


class Relay:
    """Implements ``ChannelEvents`` for all channels of a process; its calls return at once.

    The owner handles all that has gathered, as many events at a time as ``SLICE_S`` allows. Only the end
    of a frame wakes the owner's loop: woken for the first section, the two threads waited for each other.
    """

    def __init__(self, owner: OwnerEvents, channels: Channels) -> None:
        self._owner = owner
        self._channels = channels
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._waiting: deque[tuple[float, Route | None, Callable[..., None], tuple[Any, ...]]] = deque()
        self._scheduled = False
        self._faults = FaultCounter("an event of a channel could not be handled; its channel ends", logger)

    @property
    def faults(self) -> int:
        """Events that could not be handled; above 0 is a defect."""
        return self._faults.count

    @property
    def lag_s(self) -> float:
        """Seconds that the oldest event has waited for the owner; 0 if none waits."""
        try:
            return max(self._clock() - self._waiting[0][0], 0.0)
        except IndexError:
            return 0.0

    # ---- ChannelEvents, on the channels' thread

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        self._put(route, self._open, route, hello, ended)

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        self._put(None, self._broken, route)
        return []

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        for start in range(0, len(records), RECORDS):
            self._add(route, self._records, route, records[start : start + RECORDS])
        return []

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None:
        self._put(route, self._owner.on_answer, route, attempt, outcome)

    def on_kv(self, route: Route, section: KvSection) -> bool:
        self._add(route, self._kv, route, section)
        return True

    def on_load(self, route: Route, load: LoadReport) -> None:
        self._add(route, self._owner.on_load, route, load)

    def on_figures(self, route: Route, figures: Figures) -> None:
        self._add(route, self._owner.on_figures, route, figures)

    def on_suspect(self, route: Route, suspected: bool) -> None:
        self._put(route, self._owner.on_suspect, route, suspected)

    def on_closed(self, route: Route, reason: str, fault: bool) -> None:
        self._put(None, self._owner.on_closed, route, reason, fault)

    def on_frame_end(self, done: Callable[[], None]) -> None:
        self._put(None, done)

    def _add(self, route: Route | None, call: Callable[..., None], *arguments: Any) -> None:
        """Add part of a frame; the frame's end, or the channel's if the rest is unreadable, wakes the owner."""
        self._waiting.append((self._clock(), route, call, arguments))

    def _put(self, route: Route | None, call: Callable[..., None], *arguments: Any) -> None:
        self._add(route, call, *arguments)
        # The code that clears the flag looks at the queue afterwards, so nothing stays there.
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
                self._loop.call_soon_threadsafe(self._drain, context=contextvars.Context())

    # ---- on the owner's loop

    def _drain(self) -> None:
        self._scheduled = False
        until = self._clock() + SLICE_S
        while self._waiting:
            _, route, call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001  (a defect must not end what all channels need)
                self._faults.add()
                if route is not None:
                    self._channels.fail(route, describe(error))
            if self._clock() >= until and self._waiting:
                if not self._scheduled:  # an event that came meanwhile has scheduled the next turn
                    self._scheduled = True
                    self._loop.call_soon(self._drain)
                return

    def _open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        try:
            self._owner.on_open(route, hello, ended)
        except Exception:
            if ended is not None:  # or its attempts would wait for ever for the channel that they continue on
                self._owner.on_closed(ended, "its next channel could not be opened", False)
            raise

    def _records(self, route: Route, records: list[wire.Record]) -> None:
        stale = self._owner.on_records(route, records)
        if stale:
            self._channels.forget(route, stale)

    def _broken(self, route: Route) -> None:
        claims: Sequence[AttemptClaim] = ()
        try:
            claims = self._owner.on_broken(route)
        finally:
            self._channels.resume(route, claims)

    def _kv(self, route: Route, section: KvSection) -> None:
        if not self._owner.on_kv(route, section):
            self._channels.resync(route)
