"""What follows an engine's KV events, as a router does."""

from __future__ import annotations

from functools import reduce
from operator import xor

from engine.kv.kv_events import KvBatch, KvSnapshot


class Follower:
    """What somebody knows who had a snapshot and gets every batch since."""

    def __init__(self, snapshot: KvSnapshot) -> None:
        self.keys = set(snapshot.keys)
        self.sequence = snapshot.sequence
        assert len(snapshot.keys) == len(self.keys) == snapshot.count
        assert snapshot.xor == reduce(xor, self.keys, 0)

    def follow(self, batch: KvBatch | None) -> None:
        if batch is None:
            return
        assert batch.sequence == self.sequence + 1
        self.sequence = batch.sequence
        if batch.cleared:
            self.keys.clear()
        stored, removed = set(batch.stored), set(batch.removed)
        assert len(stored) + len(removed) == len(batch)
        assert stored.isdisjoint(removed)
        assert stored.isdisjoint(self.keys)
        assert removed <= self.keys
        self.keys = self.keys - removed | stored
        assert batch.count == len(self.keys)
        assert batch.xor == reduce(xor, self.keys, 0)
