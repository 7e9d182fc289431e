"""Brings the KV events of channels to the index of who holds what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from app import wire
from app.routing.ledger import Ledger, Route
from app.wire_kv import KvSection, SnapshotSlice
from engine.block_keys import KeyScheme

logger = logging.getLogger(__name__)


class ResidencyIndex(Protocol):
    """Which replica holds which keys, as of which batch of which epoch; ``KvIndex`` is one."""

    window_blocks: int | None

    def add(self, replica: str, epoch: int) -> None:
        """A replica is there, with a channel of this epoch."""

    def remove(self, replica: str) -> None:
        """Forget a replica."""

    def snapshot(self, replica: str, epoch: int, sequence: int, keys: Sequence[int], complete: bool) -> bool:
        """All that a replica holds, in parts; false: another one is needed."""

    def apply(
        self,
        replica: str,
        epoch: int,
        sequence: int,
        stored: Sequence[int],
        removed: Sequence[int],
        cleared: bool,
    ) -> bool:
        """A change of it; false: it is not the next one, a snapshot is needed."""

    def verify(self, replica: str, sequence: int, xor: int, count: int) -> bool:
        """Whether what the index has is what the replica had after ``sequence``."""


class KvFeed:
    """Belongs to the ingress's event loop; the ledger's lock guards the index.

    ``keys`` says how this ingress has to name blocks so that it names them as the replicas do; ``None`` until
    one has said. A replica that names the same blocks otherwise is routed to by its load alone.
    """

    def __init__(self, ledger: Ledger, index: ResidencyIndex | None) -> None:
        self.keys: KeyScheme | None = None
        self._ledger = ledger
        self._index = index
        self._trusted: set[Route] = set()

    def open(self, route: Route, hello: wire.Hello) -> None:
        """A channel has opened; checks that both ends make the same keys."""
        if hello.keys is None:
            return
        if not hello.agrees:
            logger.error(
                "replica %s names blocks otherwise than this process: requests are routed to it without regard "
                "to its prefix cache; run one release everywhere",
                route.replica,
            )
            return
        self.keys = hello.keys
        self._trusted.add(route)
        window = hello.window
        blocks = None if window is None else max(-(-(window - 1) // hello.limits.block_size), 1)

        def step(index: ResidencyIndex) -> bool:
            index.window_blocks = blocks
            index.add(route.replica, route.epoch)
            return True

        self._do(step)

    def update(self, route: Route, section: KvSection) -> bool:
        """Take a part of a snapshot or a change; false if only a snapshot can help."""
        if route not in self._trusted:
            return True

        def step(index: ResidencyIndex) -> bool:
            place = (route.replica, route.epoch, section.sequence)
            if isinstance(section, SnapshotSlice):
                last = section.part + 1 == section.parts
                fits = index.snapshot(*place, section.keys, last)
                if not (fits and last):
                    return fits
            elif not index.apply(*place, section.stored, section.removed, section.cleared):
                return False
            return index.verify(route.replica, section.sequence, section.xor, section.count)

        return self._do(step)

    def close(self, route: Route) -> None:
        """A channel has ended: what the replica holds is not known any more."""
        if route not in self._trusted:
            return
        self._trusted.discard(route)

        def step(index: ResidencyIndex) -> bool:
            index.remove(route.replica)
            return True

        self._do(step)

    def _do(self, step: Callable[[ResidencyIndex], bool]) -> bool:
        index = self._index
        return index is None or self._ledger.with_index(lambda _: step(index)) is not False
