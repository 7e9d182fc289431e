"""KV events on their way out of an engine replica."""

from __future__ import annotations

from collections import deque

from app.channel.wire_kv import SLICE_KEYS, KvSection, SnapshotSlice, slices
from engine.kv.kv_events import KvBatch, KvSnapshot

FLUSH_S = 0.05
"""KV events and load leave with the next tokens, at the latest after this long."""

FLUSH_RECORDS = 256
"""Or at once, when so many have gathered."""

MAX_BACKLOG = 65_536
"""Records that may wait for one channel; beyond it they are dropped and a snapshot is sent instead."""


class KvOutbox:
    """KV events on their way to one ingress: a snapshot in slices, then batches in order.

    Its owner fetches a snapshot whenever ``wanted`` is true, and calls ``begin`` with it. Batches that come
    meanwhile are kept: those that the snapshot includes are dropped then.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.backlog = 0  # records in batches, and one for each
        self._fetching = False
        self._stale = False  # batches were dropped while the snapshot was fetched
        self._slices: deque[SnapshotSlice] = deque()
        self._batches: deque[KvBatch] = deque()

    @property
    def urgent(self) -> bool:
        """Whether what waits should not wait any longer."""
        return bool(self._slices) or (self.backlog >= FLUSH_RECORDS and not self._fetching)

    def __bool__(self) -> bool:
        """Whether :meth:`take` has anything to give."""
        return bool(self._slices) or (bool(self._batches) and not self._fetching)

    def add(self, batch: KvBatch) -> None:
        """The next batch of the engine."""
        if self.wanted:
            return  # what comes before the snapshot is in it
        self._batches.append(batch)
        self.backlog += 1 + len(batch)
        if self.backlog > MAX_BACKLOG:
            self.restart()

    def restart(self) -> None:
        """Drop all that waits, and begin anew with a snapshot."""
        self._drop()
        if self._fetching:
            self._stale = True
        else:
            self.wanted = True

    def resend(self) -> None:
        """The ingress asks for a snapshot: if none is on its way already, which it will find newer."""
        if not (self._fetching or self._slices):
            self.restart()

    def fetch(self) -> None:
        """The owner has asked the engine for a snapshot."""
        self.wanted = False
        self._fetching = True

    def begin(self, snapshot: KvSnapshot) -> None:
        """Here it is."""
        self._fetching = False
        if self._stale:
            self._stale = False
            self._drop()
            self.wanted = True
            return
        self._slices.extend(slices(snapshot))
        while self._batches and self._batches[0].sequence <= snapshot.sequence:
            self.backlog -= 1 + len(self._batches.popleft())

    def take(self) -> list[KvSection]:
        """What the next frame carries: one slice, or up to as many keys in batches, at least one batch."""
        if self._slices:
            return [self._slices.popleft()]
        if self._fetching:
            return []
        taken: list[KvSection] = []
        records = 0
        while self._batches and (not taken or records + len(self._batches[0]) <= SLICE_KEYS):
            batch = self._batches.popleft()
            records += len(batch)
            self.backlog -= 1 + len(batch)
            taken.append(batch)
        return taken

    def _drop(self) -> None:
        self._slices.clear()
        self._batches.clear()
        self.backlog = 0
