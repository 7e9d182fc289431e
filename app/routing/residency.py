"""What a ledger asks of an index of who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Residency(Protocol):
    """Which replica holds what; the ledger's lock guards it. Times are monotonic seconds."""

    def add(self, replica: str, epoch: int = 0) -> None:
        """A route has opened."""

    def remove(self, replica: str) -> None:
        """It is gone."""

    def longest(self, keys: Sequence[int]) -> Mapping[str, int]:
        """How many of the first blocks each replica holds or is about to."""

    def speculate(
        self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0
    ) -> None:
        """The replica is about to hold these; ``blocks`` of them it does already, as ``longest`` said."""

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """It is not, after all."""

    def expire(self, now: float) -> int:
        """Forget what should have come by now."""
