"""Brings the KV events of channels to the index of who holds what."""

from __future__ import annotations

import logging
from collections.abc import Callable

from app import wire
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.wire_kv import KvSection, SnapshotSlice
from engine.block_keys import KeyScheme

logger = logging.getLogger(__name__)


class KvFeed:
    """Belongs to the ingress's event loop. ``index`` is the ledger's: its lock guards it, its routes add to it.

    ``keys`` says how this ingress has to name blocks so that it names them as the replicas do; ``None`` until
    one has said. A replica that names the same blocks otherwise is routed to by its load alone.
    """

    def __init__(self, ledger: Ledger, index: KvIndex) -> None:
        self.keys: KeyScheme | None = None
        self._ledger = ledger
        self._index = index
        self._trusted: set[Route] = set()
        self._reported: set[str] = set()

    def open(self, route: Route, hello: wire.Hello) -> None:
        """A channel has opened, and its route; checks that both ends make the same keys."""
        if hello.keys is None or not hello.agrees:
            self._distrust(route.replica, hello)
            return
        self.keys = hello.keys
        self._trusted.add(route)
        window = hello.window
        blocks = None if window is None else max(-(-(window - 1) // hello.limits.block_size), 1)

        def step(index: KvIndex) -> bool:
            index.window_blocks = blocks
            return True

        self._do(step)

    def update(self, route: Route, section: KvSection) -> bool:
        """Take a part of a snapshot or a change; false if only a snapshot can help."""
        if route not in self._trusted:
            return True

        def step(index: KvIndex) -> bool:
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
        """A channel has ended."""
        self._trusted.discard(route)

    def _distrust(self, replica: str, hello: wire.Hello) -> None:
        """What the replica holds says nothing here, nor what it is about to hold."""
        if not hello.agrees and replica not in self._reported:
            self._reported.add(replica)
            logger.error(
                "replica %s names blocks otherwise than this process: requests are routed to it without regard "
                "to its prefix cache; run one release everywhere",
                replica,
            )

        def step(index: KvIndex) -> bool:
            index.remove(replica)
            return True

        self._do(step)

    def _do(self, step: Callable[[KvIndex], bool]) -> bool:
        return self._ledger.with_index(lambda _: step(self._index)) is not False
