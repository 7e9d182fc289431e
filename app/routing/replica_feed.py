"""Where one replica's events stand: what was applied, and what waits for a snapshot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KvDelta:
    """One batch of events; it is net: no key is both stored and removed, and what was cleared comes first."""

    sequence: int
    stored: Sequence[int]
    removed: Sequence[int]
    cleared: bool

    @property
    def records(self) -> int:
        """What it counts for where batches are bounded."""
        return 1 + len(self.stored) + len(self.removed)


@dataclass(slots=True, eq=False)
class ReplicaFeed:
    """A replica's slot, its place in the order of events, and the digest of what it holds.

    While it is not synced, deltas wait in ``pending``, gapless and after ``floor``; a snapshot is of use only
    at or after ``floor``.
    """

    slot: int
    epoch: int
    sequence: int = -1
    synced: bool = False
    xor: int = 0
    count: int = 0

    floor: int = -1
    asked: bool = False
    """Whether the caller has been told, since the last loss, that a snapshot is needed."""
    loading: int | None = None
    """Sequence of the snapshot of which parts have come."""
    pending: deque[KvDelta] = field(default_factory=deque)
    waiting: int = 0
    """Records in ``pending``."""

    def lose(self, floor: int) -> None:
        """What is known is not to be trusted; wait for a snapshot at ``floor`` or after."""
        self.synced = False
        self.asked = False
        self.loading = None
        self.floor = floor
        self._forget_pending()

    def hold(self, delta: KvDelta, limit: int) -> bool:
        """Keep a delta for after the snapshot; false if the caller has to ask for one (again).

        Of more than ``limit`` records the oldest go, since a later snapshot has them.
        """
        asked, self.asked = self.asked, True
        if delta.sequence <= (self.pending[-1].sequence if self.pending else self.floor):
            return asked
        if self.pending and delta.sequence > self.pending[-1].sequence + 1:
            self._forget_pending()
            asked = False
        self.pending.append(delta)
        self.waiting += delta.records
        while self.waiting > limit:
            oldest = self.pending.popleft()
            self.waiting -= oldest.records
            self.floor = oldest.sequence
            asked = False
        if self.pending:
            self.floor = max(self.floor, self.pending[0].sequence - 1)
        return asked

    def take_pending(self) -> list[KvDelta]:
        """Return the deltas after ``sequence``, in order, and forget them all."""
        deltas = [delta for delta in self.pending if delta.sequence > self.sequence]
        self._forget_pending()
        return deltas

    def _forget_pending(self) -> None:
        self.pending.clear()
        self.waiting = 0


@dataclass(slots=True)
class KvIndexCounters:
    """What should not happen in a healthy fleet; only ever grows."""

    repeated: int = 0
    """Keys stored that were there already."""
    unknown: int = 0
    """Keys removed that were not there."""
    replays: int = 0
    """Deltas and snapshots that were applied already."""
    stale: int = 0
    """Deltas and snapshots of an old epoch or of no known replica."""
    gaps: int = 0
    """Times a replica's blocks stopped to count because a delta was missing."""
    late: int = 0
    """Snapshots older than the deltas that wait for one."""
    drift: int = 0
    """Digests that differed from the engine's."""
