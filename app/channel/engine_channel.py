"""The engine's end of one channel: what has yet to be sent to one ingress process."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from app.channel import wire
from app.channel.kv_outbox import FLUSH_S, KvOutbox
from app.channel.wire_sections import Section
from app.routing.load import LoadReport
from engine.errors import QuireError
from engine.kv.kv_events import KvBatch

LOAD_S = 0.3
"""A load that differs little from the last one leaves with the next tokens, or after this long."""

MAX_UNACKNOWLEDGED = 512
"""Maximum number of unacknowledged frames; beyond it tokens accumulate here, in one record per sequence."""


class UnknownEpochError(QuireError):
    """This replica does not have the channel, or no longer has it."""


@dataclass(slots=True)
class Attempt:
    """One attempt that runs here. ``done`` gets the number of generated tokens, or ``UnknownEpochError``."""

    number: int
    engine_id: str
    channel: EngineChannel
    done: asyncio.Future[int]
    generated: int = 0


@dataclass(slots=True, eq=False)
class EngineChannel:
    """State of one channel, identified by ingress process (``cid``) and epoch."""

    cid: str
    epoch: int
    beats: int = 0
    suspended: bool = False  # no beat has come for a while: frames wait until one does
    sequence: int = 0
    last_frame: float = 0.0
    acknowledged: int = 0  # frames that the ingress has read
    unsent: dict[int, dict[int, wire.Record]] = field(default_factory=dict)  # by attempt and sequence
    attempts: dict[int, Attempt] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: str = ""  # the reason, once closed
    lapsed: bool = False  # closed because no beat came
    kv: KvOutbox = field(default_factory=KvOutbox)
    load: LoadReport | None = None  # not sent yet
    last_load: LoadReport | None = None  # that was sent
    figures_due: float = 0.0  # when the replica's figures are to be sent next
    last_received: int = 0  # highest attempt that the engine has received
    flush: asyncio.TimerHandle | None = None  # sends KV events and load that no token takes along
    fetch: asyncio.Task[None] | None = None  # of a snapshot of the prefix cache

    @property
    def blocked(self) -> bool:
        """Whether no frame may leave: too many are unacknowledged, or the ingress is silent."""
        return self.suspended or self.sequence - self.acknowledged >= MAX_UNACKNOWLEDGED

    def take_records(self) -> list[wire.Record]:
        """All unsent records, for the next frame."""
        records = [record for sequences in self.unsent.values() for record in sequences.values()]
        self.unsent.clear()
        return records

    def offer(self, load: LoadReport, batch: KvBatch | None) -> None:
        """Queue the load and KV events of one step.

        They leave with the next tokens, or after ``FLUSH_S``; a load that says little new after ``LOAD_S``.
        """
        delay = math.inf
        self.load = None
        if load != self.last_load:
            self.load = load
            delay = FLUSH_S if self.last_load is None or load.differs_much(self.last_load) else LOAD_S
        if batch is not None:
            self.kv.add(batch)
            if self.kv.urgent or self.kv.wanted:
                self.wake.set()
        if self.kv:
            delay = FLUSH_S
        loop = asyncio.get_running_loop()
        if delay < math.inf and (self.flush is None or self.flush.when() > loop.time() + delay):
            if self.flush is not None:
                self.flush.cancel()
            self.flush = loop.call_later(delay, self.wake.set)

    def stop(self) -> None:
        """Cancel its timer and task."""
        if self.flush is not None:
            self.flush.cancel()
            self.flush = None
        if self.fetch is not None:
            self.fetch.cancel()
            self.fetch = None

    def take_sections(self) -> list[Section]:
        """KV events and load for the next frame; if some remain, another frame follows."""
        if self.flush is not None:
            self.flush.cancel()
            self.flush = None
        sections: list[Section] = list(self.kv.take())
        if self.load is not None:
            sections.append(self.load)
            self.last_load, self.load = self.load, None
        if self.kv:
            self.wake.set()
        return sections
