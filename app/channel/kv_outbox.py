"""KV events that an engine replica has yet to send."""

from __future__ import annotations

from collections import deque

from app.channel.wire_sections import SLICE_KEYS, KvSection, SnapshotSlice, slices
from engine.kv.kv_events import KvBatch, KvSnapshot

FLUSH_S = 0.05
"""KV events and load are sent with the next tokens, or after this long."""

FLUSH_RECORDS = 256
"""Events are sent at once when this many have accumulated."""

MAX_BACKLOG = 65_536
"""Maximum number of events that wait for one channel; beyond it a snapshot replaces them."""


class KvOutbox:
    """KV events for one ingress: a snapshot in slices, then batches in order.

    Whenever ``wanted`` is true, the owner fetches a snapshot and calls ``begin`` with it. Batches that arrive
    meanwhile are kept; ``begin`` drops the ones that the snapshot includes.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.backlog = 0  # events in batches, plus one for each batch
        self._fetching = False
        self._stale = False  # batches were dropped while the snapshot was fetched
        self._slices: deque[SnapshotSlice] = deque()
        self._batches: deque[KvBatch] = deque()

    @property
    def urgent(self) -> bool:
        """Whether the contents should leave at once."""
        return bool(self._slices) or (self.backlog >= FLUSH_RECORDS and not self._fetching)

    def __bool__(self) -> bool:
        """Whether :meth:`take` would return anything."""
        return bool(self._slices) or (bool(self._batches) and not self._fetching)

    def add(self, batch: KvBatch) -> None:
        """Append the engine's next batch."""
        if self.wanted:
            return  # the snapshot will include it
        self._batches.append(batch)
        self.backlog += 1 + len(batch)
        if self.backlog > MAX_BACKLOG:
            self.restart()

    def restart(self) -> None:
        """Drop everything, and start over with a snapshot."""
        self._drop()
        if self._fetching:
            self._stale = True
        else:
            self.wanted = True

    def resend(self) -> None:
        """The ingress requests a snapshot; nothing to do if one is already being sent."""
        if not (self._fetching or self._slices):
            self.restart()

    def fetch(self) -> None:
        """The owner has asked the engine for a snapshot."""
        self.wanted = False
        self._fetching = True

    def begin(self, snapshot: KvSnapshot) -> None:
        """The snapshot has arrived."""
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
        """Take the next frame's part: a slice, or batches with at most as many keys in all."""
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
