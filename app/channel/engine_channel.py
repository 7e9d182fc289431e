"""The engine's end of one channel: what has yet to be sent to one ingress process."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.channel import wire
from app.channel.kv_outbox import FLUSH_S, KvOutbox
from app.channel.wire_sections import Section
from app.routing.load import LoadReport
from engine.errors import QuireError
from engine.kv.kv_events import KvBatch

LOAD_S = 0.3
"""A load that differs little from the last one is sent with the next tokens, or after this long."""

MAX_UNACKNOWLEDGED = 512
"""Maximum number of unacknowledged frames; beyond it tokens accumulate here, in one record per sequence."""

MAX_WAITING_TOKENS = 2**20
"""Maximum number of tokens that wait for an ingress that does not read, about 40 MB; beyond it, the attempts
with the most end, and are tried again.

A token with log probabilities counts as several, by the number of its alternatives.
"""


class FrameConnection(Protocol):
    """The part of a channel's connection that sends frames."""

    def send_frame(self, frame: bytes) -> None:
        """Send a frame, after all that were sent before."""

    def close(self) -> None:
        """End the connection once all has been sent."""


class UnknownEpochError(QuireError):
    """This replica does not have the channel, or no longer has it."""


@dataclass(slots=True)
class Attempt:
    """One attempt that runs here. ``done`` gets the number of generated tokens, or ``UnknownEpochError``.

    While it is ``leaving``, its call has ended, but it is not known yet whether the whole connection has: its
    tokens are ``withheld``.
    """

    number: int
    engine_id: str
    channel: EngineChannel
    done: asyncio.Future[int]
    generated: int = 0
    leaving: bool = False
    withheld: list[wire.Record] = field(default_factory=list)

    def stay(self) -> None:
        """The connection has broken: the attempt may be resumed, and its withheld tokens are needed."""
        self.leaving = False
        for record in self.withheld:
            self.channel.add(record)
        self.withheld.clear()


@dataclass(slots=True, eq=False)
class EngineChannel:
    """State of one channel, identified by ingress process (``cid``) and epoch."""

    cid: str
    epoch: int
    beats: int = 0
    suspended: bool = False  # no beat has come for a while: frames wait until one does
    sequence: int = 0
    last_frame: float = 0.0
    acknowledged: int = 0  # frames that the ingress has handled
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)  # with tokens, and not acknowledged
    unsent: dict[int, dict[int, wire.Record]] = field(default_factory=dict)  # by attempt and sequence
    waiting_tokens: int = 0  # in ``unsent``, see ``MAX_WAITING_TOKENS``
    attempts: dict[int, Attempt] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    expects: asyncio.TimerHandle | None = None  # until its connection arrives, frames wait
    connection: FrameConnection | None = None  # that takes its frames, instead of Serve's stream
    congested: bool = False  # the connection has more to send than it can
    closed: str = ""  # the reason, once closed
    lapsed: bool = False  # closed because no beat came
    kv: KvOutbox = field(default_factory=KvOutbox)
    load: LoadReport | None = None  # not sent yet
    last_load: LoadReport | None = None  # that was sent
    figures_due: float = 0.0  # when the replica's figures are to be sent next
    last_received: int = 0  # highest attempt that the engine has received
    flush: asyncio.TimerHandle | None = None  # sends KV events and load that no token takes along
    fetch: asyncio.Task[None] | None = None  # of a snapshot of the prefix cache
    expiry: asyncio.TimerHandle | None = None  # ends what has been kept since the channel ended
    kept_until: float = 0.0  # at the latest, once it has ended; on the hub's clock

    @property
    def blocked(self) -> bool:
        """Whether no frame may leave: the ingress is silent, or as many are on their way as may be."""
        if self.suspended or self.congested or self.expects is not None:
            return True
        return self.sequence - self.acknowledged >= MAX_UNACKNOWLEDGED

    def add(self, record: wire.Record) -> None:
        """Queue a record; it joins a waiting one of its sequence. A final one comes after all others."""
        self.waiting_tokens += _weight(record)
        unsent = self.unsent.setdefault(record.attempt, {})
        waiting = unsent.get(record.sequence)
        if waiting is None:
            unsent[record.sequence] = record
            return
        waiting.token_ids.extend(record.token_ids)
        if record.logprobs is not None:
            waiting.logprobs = [*(waiting.logprobs or ()), *record.logprobs]
        if record.prompt_logprobs is not None:
            waiting.prompt_logprobs = record.prompt_logprobs
        if record.stats is not None:
            waiting.stats = record.stats
        waiting.cached_tokens = record.cached_tokens
        waiting.end, waiting.message, waiting.final = record.end, record.message, record.final
        if record.final:
            del unsent[record.sequence]
            first = next(iter(unsent.values()), None)
            if first is not None and waiting.prompt_logprobs is not None:  # all sequences need them
                first.prompt_logprobs, waiting.prompt_logprobs = waiting.prompt_logprobs, None
            unsent[record.sequence] = waiting

    def by_waiting_tokens(self) -> list[int]:
        """The attempts whose tokens wait, those with the most first."""
        weights = {number: sum(map(_weight, records.values())) for number, records in self.unsent.items()}
        return sorted(weights, key=weights.__getitem__, reverse=True)

    def drop_records(self, attempt: int) -> None:
        """Forget the waiting records of an attempt."""
        for record in self.unsent.pop(attempt, {}).values():
            self.waiting_tokens -= _weight(record)

    def take_frame(self, sequence: int, sections: Sequence[Section] = ()) -> bytes:
        """The next frame: all unsent records. It is kept until the ingress acknowledges it."""
        records = [record for sequences in self.unsent.values() for record in sequences.values()]
        self.unsent.clear()
        self.waiting_tokens = 0
        frame = wire.pack_records(self.epoch, sequence, records, sections)
        if records:
            self.sent.append((sequence, frame))
        return frame

    def send(self, frame: bytes) -> bool:
        """Send a frame on the channel's connection; false if it has none."""
        if self.connection is None:
            return False
        self.connection.send_frame(frame)
        return True

    def acknowledge(self, frames: int) -> None:
        """The ingress has handled this many frames."""
        self.acknowledged = max(self.acknowledged, min(frames, self.sequence))
        while self.sent and self.sent[0][0] < self.acknowledged:
            self.sent.popleft()

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
        """Cancel its timers and task."""
        if self.expects is not None:
            self.expects.cancel()
            self.expects = None
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
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


def _weight(record: wire.Record) -> int:
    """A record in tokens without log probabilities, by the memory that it takes."""
    weight = len(record.token_ids)
    for scores in (record.logprobs, record.prompt_logprobs):
        if scores:
            weight += len(scores) * (3 + 2 * len(scores[0].top_ids))  # all have as many
    return weight
