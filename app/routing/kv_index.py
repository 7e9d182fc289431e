"""What every replica's cache holds, according to its events; finds a request's prefix on each in one walk."""

from __future__ import annotations

from collections.abc import Sequence

from app.routing.block_masks import BlockMasks
from app.routing.claims import Claims
from app.routing.prefix_walk import PrefixWalk, window_ends
from app.routing.replica_feed import KvDelta, KvIndexCounters, ReplicaFeed

SWEEP_SLICE = 512
"""Keys swept, while any slot waits to be swept, with each delta or part of a snapshot."""
MAX_NAMED = 1024
"""Sets of replicas whose names are remembered."""


class KvIndex:
    """Exact residency from events, plus the blocks that routed requests are about to add (claims).

    **Order.** A replica's events have an epoch (its channel's; it only grows) and, within it, a sequence
    number. A snapshot has the number of the last delta that it contains. A replica's blocks count only while it
    is synced: from a snapshot on, until a gap, a newer epoch or a different digest. While it is not synced, it
    stays a candidate with only its claimed blocks, and its deltas wait.

    **Keys** are those of :mod:`engine.kv.block_keys`: each names the whole prefix up to its block. Without a
    window, an engine never holds a block without those before it, so the walk bisects: it visits
    O(log keys) of them for each change of the set of replicas, and goes on with what is coming right behind.
    With a window (``window_blocks``, see there) a hit needs only the last blocks, and the walk visits all keys.

    A replica either has a key or does not. If an engine stores two blocks with equal keys (which takes a
    collision of 64-bit hashes), it reports the key with the first and its removal with the last, and includes
    it in its digest once. If it does otherwise, a hit is missed or overestimated, but no answer is wrong.

    **Memory.** 65 to 90 bytes for each distinct block, however many replicas have it. ``max_claimed`` bounds
    the expected blocks, plus one for each claim; ``max_waiting`` bounds the records that wait for one replica's
    snapshot.

    Not thread-safe: the owner must hold a lock.
    """

    def __init__(
        self, window_blocks: int | None = None, max_claimed: int = 131_072, max_waiting: int = 262_144
    ) -> None:
        """Make an empty index.

        Args:
            window_blocks: of a model no layer of which sees more than ``w`` tokens, ``ceil((w - 1) /
                block_size)``: a hit of L blocks needs the last that many before L, or all L if it has fewer.
            max_claimed: most blocks claimed, one for each request that claims it.
            max_waiting: most records kept for one replica that waits for its snapshot.

        Raises:
            ValueError: a number is not positive.
        """
        if min(max_claimed, max_waiting, 1 if window_blocks is None else window_blocks) < 1:
            raise ValueError("window_blocks, max_claimed and max_waiting must be at least 1")
        self.window_blocks = window_blocks
        self.counters = KvIndexCounters()
        self._max_waiting = max_waiting
        self._masks = BlockMasks()
        self._claims = Claims(max_claimed)
        self._feeds: dict[str, ReplicaFeed] = {}
        self._names: list[str] = []
        self._named: dict[int, tuple[str, ...]] = {}
        self._walk = PrefixWalk()
        self._sent: list[tuple[str, Sequence[int], float, float, int]] = []
        self._exact = 0

    def __len__(self) -> int:
        """Distinct keys that are or were held; those that were go as sweeps go on."""
        return len(self._masks)

    @property
    def replicas(self) -> list[str]:
        """Replicas added and not removed."""
        return list(self._feeds)

    @property
    def unswept(self) -> int:
        """Slots that wait to be swept."""
        return self._masks.unswept

    @property
    def slots(self) -> int:
        """Slots that exist, in use or not."""
        return self._masks.slots

    def add(self, replica: str, epoch: int = 0) -> None:
        """Make a replica a candidate; events of an older epoch will be refused. A newer epoch resets it."""
        self._claim()
        feed = self._feeds.get(replica)
        if feed is None:
            feed = self._feeds[replica] = ReplicaFeed(self._masks.acquire(), epoch)
            self._use(replica, feed)
        elif epoch > feed.epoch:
            self._restart(replica, feed, epoch)

    def remove(self, replica: str) -> None:
        """Forget a replica at once; memory comes back as sweeps go on."""
        self._claim()
        feed = self._feeds.pop(replica, None)
        if feed is not None:
            self._disuse(feed)
            self._claims.detach(replica)

    def synced(self, replica: str) -> bool:
        """Whether the replica's blocks count."""
        feed = self._feeds.get(replica)
        return feed is not None and feed.synced

    def longest(self, keys: Sequence[int]) -> dict[str, int]:
        """Return for each replica how many of the first blocks are there or coming."""
        if self._sent:
            self._claim()
        depths = dict.fromkeys(self._feeds, 0)
        if keys and self.window_blocks is None:
            starts, count = self._claims.starts, len(keys)
            coming = [0] if keys[0] in starts else []
            for replicas, blocks in self._walk.ends(keys, self._masks.shards, self._exact):
                for name in self._names_of(replicas):
                    depths[name] = blocks
                if blocks < count and keys[blocks] in starts:
                    coming.append(blocks)
            for blocks in coming:
                self._claims.deepen(depths, blocks, keys)
        elif keys and self.window_blocks is not None:
            for replicas, blocks in window_ends(self._present(keys), self.window_blocks):
                for name in self._names_of(replicas):
                    depths[name] = blocks
        return depths

    def apply(
        self,
        replica: str,
        epoch: int,
        sequence: int,
        stored: Sequence[int] = (),
        removed: Sequence[int] = (),
        cleared: bool = False,
    ) -> bool:
        """Take one delta: first what was cleared, then removed and stored keys, which do not overlap.

        ``False`` asks for a snapshot: there is a gap, no snapshot has come yet, or too much waits for one. It
        is returned once; further deltas then wait, and the result is ``True``. It is also ``False`` for an old
        epoch or an unknown replica: then nothing changes, and ``synced`` says whether a snapshot would help.
        """
        self._claim()
        self._masks.sweep(SWEEP_SLICE)
        feed = self._feed(replica, epoch)
        if feed is None:
            return False
        delta = KvDelta(sequence, stored, removed, cleared)
        if feed.synced:
            if sequence <= feed.sequence:
                self.counters.replays += 1
                return True
            if sequence == feed.sequence + 1:
                self._change(replica, feed, delta)
                return True
            self.counters.gaps += 1
            self._lose(replica, feed, feed.sequence)
        return feed.hold(delta, self._max_waiting)

    def snapshot(
        self, replica: str, epoch: int, sequence: int, keys: Sequence[int], complete: bool = True
    ) -> bool:
        """Take all keys that a replica holds after ``sequence``, then the deltas that waited.

        It may come in parts, all but the last with ``complete=False``. For an old epoch, an unknown replica, or
        a snapshot older than the waiting deltas, nothing changes and the result is ``False``: request another.
        A snapshot that is not newer than what was applied is ignored.
        """
        self._claim()
        self._masks.sweep(SWEEP_SLICE)
        feed = self._feed(replica, epoch)
        if feed is None:
            return False
        if feed.synced:
            if sequence <= feed.sequence:
                self.counters.replays += 1
                return True
            self._lose(replica, feed, sequence)
        if sequence < feed.floor:
            self.counters.late += 1
            return False
        if feed.loading != sequence:
            self._empty(replica, feed)
            feed.loading = sequence
        self._store(replica, feed, keys)
        if complete:
            feed.loading = None
            feed.sequence = sequence
            feed.synced = True
            self._exact |= 1 << feed.slot
            for delta in feed.take_pending():
                self._change(replica, feed, delta)
        return True

    def digest(self, replica: str) -> tuple[int, int, int] | None:
        """Return (sequence, XOR of the keys, number of keys) as of the last delta; None while not synced."""
        feed = self._feeds.get(replica)
        return (feed.sequence, feed.xor, feed.count) if feed is not None and feed.synced else None

    def verify(self, replica: str, sequence: int, xor: int, count: int) -> bool:
        """Compare with the engine's digest at ``sequence``; ``False`` asks for a snapshot.

        A digest of another sequence than the last applied one is ignored (``True``). If a digest differs, the
        replica is no longer synced. The result is ``False`` until it is, so that a lost request for a snapshot
        is repeated with the next digest.
        """
        self._claim()
        feed = self._feeds.get(replica)
        if feed is None or not feed.synced:
            return False
        if sequence == feed.sequence and (xor, count) != (feed.xor, feed.count):
            self.counters.drift += 1
            self._lose(replica, feed, sequence)
            return False
        return True

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0) -> None:
        """Count these blocks as coming to the replica, until ``deadline`` (monotonic seconds, as ``now``).

        ``keys`` is the whole prefix; what the replica has already is left out (``blocks``, what ``longest`` has
        just said of it, saves the search). A stored event confirms a key. Beyond ``max_claimed`` the claims
        nearest to their deadline end. Unknown replicas are ignored.

        The work is deferred to the next call of any method, so that sending a request does not wait for it.
        ``keys`` must therefore not change.
        """
        if keys and replica in self._feeds:
            self._sent.append((replica, keys, now, deadline, blocks))

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """End the latest claim that was made with these keys; false if there is none any more."""
        self._claim()
        return self._claims.withdraw(replica, keys)

    def expire(self, now: float) -> int:
        """End all claims whose deadline has come; return how many. ``claim`` does it, too."""
        if self._sent:
            self._claim()
        return self._claims.expire(now)

    def sweep(self, limit: int = SWEEP_SLICE) -> bool:
        """Continue to free the memory of removed replicas, at most ``limit`` keys; true if there is more.

        Deltas and snapshots do it, too.
        """
        return self._masks.sweep(limit)

    def _claim(self) -> None:
        """Do the work that ``claim`` deferred."""
        while self._sent:
            replica, keys, now, deadline, blocks = self._sent.pop(0)
            self._claims.expire(now)
            if deadline <= now:
                continue
            held = self._masks.held(self._feeds[replica].slot, keys, blocks)
            self._claims.claim(replica, keys, held, deadline)

    def _feed(self, replica: str, epoch: int) -> ReplicaFeed | None:
        """The replica's feed, reset if the epoch is newer; None for an older one."""
        feed = self._feeds.get(replica)
        if feed is None or epoch < feed.epoch:
            self.counters.stale += 1
            return None
        if epoch > feed.epoch:
            self._restart(replica, feed, epoch)
        return feed

    def _restart(self, replica: str, feed: ReplicaFeed, epoch: int) -> None:
        feed.epoch = epoch
        self._claims.clear(replica)
        self._lose(replica, feed, -1)

    def _lose(self, replica: str, feed: ReplicaFeed, floor: int) -> None:
        feed.lose(floor)
        self._exact &= ~(1 << feed.slot)
        self._empty(replica, feed)

    def _empty(self, replica: str, feed: ReplicaFeed) -> None:
        """Drop all exact bits by moving to a new slot; claims come along."""
        if not feed.count:
            return
        self._disuse(feed)
        feed.slot = self._masks.acquire()
        feed.xor = feed.count = 0
        self._use(replica, feed)

    def _use(self, replica: str, feed: ReplicaFeed) -> None:
        self._names.extend([""] * (feed.slot + 1 - len(self._names)))
        self._names[feed.slot] = replica
        self._named.clear()
        if feed.synced:
            self._exact |= 1 << feed.slot
        self._claims.attach(replica)

    def _disuse(self, feed: ReplicaFeed) -> None:
        self._exact &= ~(1 << feed.slot)
        self._masks.retire(feed.slot)

    def _change(self, replica: str, feed: ReplicaFeed, delta: KvDelta) -> None:
        feed.sequence = delta.sequence
        if delta.cleared:
            self._empty(replica, feed)
        if delta.removed:
            change = self._masks.remove(feed.slot, delta.removed)
            feed.xor ^= change.xor
            feed.count -= change.count
            self.counters.unknown += change.repeated
        if delta.stored:
            self._store(replica, feed, delta.stored)

    def _store(self, replica: str, feed: ReplicaFeed, keys: Sequence[int]) -> None:
        change = self._masks.store(feed.slot, keys)
        feed.xor ^= change.xor
        feed.count += change.count
        self.counters.repeated += change.repeated
        self._claims.confirm(replica, keys, self._masks.reader(feed.slot))

    def _present(self, keys: Sequence[int]) -> list[int]:
        """Which replicas have each key, or are about to."""
        exact = self._exact
        present = [mask & exact for mask in self._masks.masks(keys)]
        for replica, begin, end in self._claims.stretches(keys):
            bit = 1 << self._feeds[replica].slot
            for place in range(begin, end):
                present[place] |= bit
        return present

    def _names_of(self, replicas: int) -> tuple[str, ...]:
        names = self._named.get(replicas)
        if names is None:
            if len(self._named) >= MAX_NAMED:
                self._named.clear()
            names = tuple(name for slot, name in enumerate(self._names) if replicas >> slot & 1)
            self._named[replicas] = names
        return names
