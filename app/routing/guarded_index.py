"""The index of cached blocks as the ledger uses it: a defect in it costs prefix hits, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from app.autoscaling.fault_counter import FaultCounter
from app.routing.replica_state import Route

T = TypeVar("T")

logger = logging.getLogger(__name__)


class BlockIndex(Protocol):
    """Knows which replica holds which blocks; the ledger's lock guards it. Times are monotonic seconds."""

    def add(self, replica: str, epoch: int = 0) -> None:
        """Add a replica whose route has opened."""

    def remove(self, replica: str) -> None:
        """Forget a replica."""

    def longest(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of the leading blocks each replica holds or will soon hold."""

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0) -> None:
        """Expect these blocks at the replica; it already holds ``blocks`` of them, as ``longest`` said."""

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """Withdraw a claim."""

    def expire(self, now: float) -> int:
        """End the claims whose deadline has passed."""


class GuardedIndex:
    """Calls ``index``, if there is one, and counts its errors in ``faults``; only ``longest`` raises them."""

    def __init__(self, index: BlockIndex | None, faults: FaultCounter) -> None:
        self._index = index
        self._faults = faults
        self.stuck = FaultCounter("the index cannot drop a replica, whose blocks may be wrong", logger)

    def add(self, route: Route) -> None:
        """Add a replica whose route has opened."""
        if self._index is not None:
            self.run(route.replica, partial(self._index.add, *route))

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        if self._index is not None:
            self.run(replica, partial(self._index.remove, replica))

    def longest(self, keys: Sequence[int], now: float) -> dict[str, int]:
        """How many of the leading blocks each replica holds or will soon hold.

        An error in it is one of the choice, which then goes by load alone.
        """
        if self._index is None:
            return {}
        self._index.expire(now)
        return self._index.longest(keys)

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int) -> None:
        """Expect these blocks at the replica, which already holds ``blocks`` of them."""
        if self._index is not None:
            self._try(self._index.claim, replica, keys, now, deadline, blocks)

    def withdraw(self, replica: str, keys: Sequence[int]) -> None:
        """Withdraw a claim."""
        if self._index is not None:
            self._try(self._index.withdraw, replica, keys)

    def expire(self, now: float) -> None:
        """End the claims whose deadline has passed."""
        if self._index is not None:
            self._try(self._index.expire, now)

    def run(self, replica: str, step: Callable[[], T]) -> T | None:
        """Run ``step``, which reads or changes the index's part of a replica; see ``Ledger.with_index``."""
        try:
            return step()
        except Exception:  # noqa: BLE001  (a defect must not fail requests)
            self._faults.add()
            if self._index is not None:
                try:
                    self._index.remove(replica)
                except Exception:  # noqa: BLE001  (its blocks are hints: requests go on)
                    self.stuck.add()
            return None

    def _try(self, change: Callable[..., object], *arguments: object) -> None:
        try:
            change(*arguments)
        except Exception:  # noqa: BLE001  (as in run; an error here makes no block wrong)
            self._faults.add()
