"""Applies the KV events of all channels to the router's index of cached blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from app.channel import wire
from app.channel.wire_sections import KvSection, SnapshotSlice
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from engine.kv.block_keys import KeyScheme

logger = logging.getLogger(__name__)

PIECE_KEYS = 256
"""Keys of a snapshot that are applied at a time; no request can be routed meanwhile."""


@dataclass(slots=True)
class Opening:
    """When a channel opened, and when its replica's blocks were first complete, in monotonic seconds."""

    opened: float
    synced: float | None = None


class KvFeed:
    """Runs on the ingress's event loop. ``index`` belongs to the ledger, whose lock guards it.

    ``keys`` is the replicas' scheme of block keys; ``None`` until the first hello. The index ignores a replica
    whose keys differ from this process's: routing then considers only its load.
    """

    def __init__(self, ledger: Ledger, index: KvIndex) -> None:
        self.keys: KeyScheme | None = None
        self._ledger = ledger
        self._index = index
        self._trusted: set[Route] = set()
        self._reported: set[str] = set()
        self._openings: dict[Route, Opening] = {}

    def open(self, route: Route, hello: wire.Hello) -> None:
        """A channel has opened; checks that both ends make the same keys."""
        self._openings[route] = Opening(time.monotonic())
        if hello.keys is None or not hello.agrees:
            self._distrust(route.replica, hello)
            return
        self.keys = hello.keys
        self._trusted.add(route)
        window = hello.window
        blocks = None if window is None else max(-(-(window - 1) // hello.limits.block_size), 1)

        def step() -> bool:
            self._index.window_blocks = blocks
            return True

        self._do(route.replica, step)

    def update(self, route: Route, section: KvSection) -> bool:
        """Apply a part of a snapshot, or a change; false if a new snapshot is needed."""
        if route not in self._trusted:
            return True

        place = (route.replica, route.epoch, section.sequence)
        if isinstance(section, SnapshotSlice):
            fits = self._load(place, section)
        else:
            fits = self._do(
                route.replica,
                lambda: (
                    self._index.apply(*place, section.stored, section.removed, section.cleared)
                    and self._index.verify(route.replica, section.sequence, section.xor, section.count)
                ),
            )
        if not fits and not self._do(route.replica, lambda: route.replica in self._index.replicas):
            # A defect removed it from the index; a snapshot would not help.
            self._trusted.discard(route)
            return True
        opening = self._openings.get(route)
        if fits and opening is not None and opening.synced is None and self._synced(route.replica):
            opening.synced = time.monotonic()
        return fits

    def close(self, route: Route) -> None:
        """A channel has ended."""
        self._trusted.discard(route)
        self._openings.pop(route, None)

    def counters(self) -> dict[str, int]:
        """Errors in the events so far; see ``KvIndexCounters``."""
        return asdict(self._index.counters)

    def state(self) -> dict[str, dict[str, Any]]:
        """For tests and debugging: each replica's ``Opening`` and the digest of its blocks.

        The digest is (sequence, XOR of the keys, number of keys), or ``None`` while the blocks are incomplete.
        """
        return {
            route.replica: {**asdict(opening), "digest": self._digest(route.replica)}
            for route, opening in self._openings.items()
        }

    def _load(self, place: tuple[str, int, int], section: SnapshotSlice) -> bool:
        """Apply a slice in pieces; requests are routed in between."""
        last = section.part + 1 == section.parts
        for begin in range(0, max(len(section.keys), 1), PIECE_KEYS):
            keys = section.keys[begin : begin + PIECE_KEYS]
            complete = last and begin + PIECE_KEYS >= len(section.keys)
            if not self._do(place[0], partial(self._index.snapshot, *place, keys, complete)):
                return False
        return not last or self._do(
            place[0], lambda: self._index.verify(place[0], section.sequence, section.xor, section.count)
        )

    def _synced(self, replica: str) -> bool:
        return self._do(replica, lambda: self._index.synced(replica))

    def _digest(self, replica: str) -> tuple[int, int, int] | None:
        return self._ledger.with_index(replica, lambda: self._index.digest(replica))

    def _distrust(self, replica: str, hello: wire.Hello) -> None:
        """Ignore the replica's blocks, cached and claimed."""
        if not hello.agrees and replica not in self._reported:
            self._reported.add(replica)
            logger.error(
                "block keys of replica %s differ from this process's, so routing ignores its prefix cache; run "
                "the same release everywhere",
                replica,
            )

        def step() -> bool:
            self._index.remove(replica)
            return True

        self._do(replica, step)

    def _do(self, replica: str, step: Callable[[], bool]) -> bool:
        """Run ``step`` under the ledger's lock; false also after a defect."""
        return self._ledger.with_index(replica, step) is True
