"""One channel as its engine replica sees it: what still has to leave for one ingress process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from app.channel import wire
from app.channel.kv_section import FLUSH_S, KvOutbox
from app.channel.wire_kv import Section
from app.routing.load import LoadReport
from engine.errors import QuireError
from engine.kv.kv_events import KvBatch

MAX_UNACKNOWLEDGED = 512
"""Frames on their way; beyond it tokens gather here, one entry for each live sequence of each attempt."""


class UnknownEpochError(QuireError):
    """The attempt was sent on a channel that this replica does not have (any more)."""


@dataclass(slots=True)
class Attempt:
    """One attempt that runs here. ``done`` gets the number of tokens made, or ``UnknownEpochError``."""

    number: int
    engine_id: str
    channel: Channel
    done: asyncio.Future[int]
    made: int = 0


@dataclass(slots=True, eq=False)
class Channel:
    """State of one (ingress process, epoch)."""

    cid: str
    epoch: int
    last_beat: float
    sequence: int = 0
    last_frame: float = 0.0
    acknowledged: int = 0  # frames that the ingress has read
    unsent: dict[int, dict[int, wire.Record]] = field(default_factory=dict)  # by attempt and sequence
    attempts: dict[int, Attempt] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: str = ""  # why
    kv: KvOutbox = field(default_factory=KvOutbox)
    load: LoadReport | None = None  # not sent yet
    last_load: LoadReport | None = None
    taken: int = 0  # highest attempt that the engine has taken in
    flush: asyncio.TimerHandle | None = None  # for what does not leave at once
    fetch: asyncio.Task[None] | None = None  # of a snapshot of the prefix cache

    @property
    def blocked(self) -> bool:
        """Whether too many frames are unacknowledged."""
        return self.sequence - self.acknowledged >= MAX_UNACKNOWLEDGED

    def take(self) -> list[wire.Record]:
        """All that is unsent, for the next frame."""
        records = [record for sequences in self.unsent.values() for record in sequences.values()]
        self.unsent.clear()
        return records

    def offer(self, load: LoadReport, batch: KvBatch | None) -> None:
        """What a step has brought about for every ingress; it leaves with tokens, or soon."""
        if load != self.last_load:
            self.load = self.last_load = load
        if batch is not None:
            self.kv.add(batch)
            if self.kv.urgent or self.kv.wanted:
                self.wake.set()
        if (self.kv or self.load is not None) and self.flush is None:
            self.flush = asyncio.get_running_loop().call_later(FLUSH_S, self.wake.set)

    def stop(self) -> None:
        """End its timer and task."""
        if self.flush is not None:
            self.flush.cancel()
            self.flush = None
        if self.fetch is not None:
            self.fetch.cancel()
            self.fetch = None

    def take_sections(self) -> list[Section]:
        """KV events and load for the next frame; what is left asks for another one."""
        if self.flush is not None:
            self.flush.cancel()
            self.flush = None
        sections: list[Section] = list(self.kv.take())
        if self.load is not None:
            sections.append(self.load)
            self.load = None
        if self.kv:
            self.wake.set()
        return sections
