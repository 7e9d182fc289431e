"""What a router knows that never hears of a replica's cache: the prefixes that it has sent there itself."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence


class ApproximateIndex:
    """For each replica the keys routed there, least recently used ones forgotten beyond a guessed capacity.

    Of a prompt the last block is forgotten first, so what is left of a prefix always has its beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._routed: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica: str, epoch: int = 0) -> None:
        self._routed.setdefault(replica, OrderedDict())

    def remove(self, replica: str) -> None:
        self._routed.pop(replica, None)

    def longest(self, keys: Sequence[int]) -> dict[str, int]:
        """Blocks of the prefix that each replica is believed to hold."""
        return {replica: _held(keys, routed) for replica, routed in self._routed.items()}

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0) -> None:
        routed = self._routed[replica]
        for key in reversed(keys):
            routed[key] = None
            routed.move_to_end(key)
        while len(routed) > self._capacity:
            routed.popitem(last=False)

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """A request ended before its time; a router like this never learns of it."""
        return False

    def expire(self, now: float) -> int:
        """Nothing is forgotten by time."""
        return 0


def _held(keys: Sequence[int], routed: OrderedDict[int, None]) -> int:
    return bisect.bisect_left(keys, True, key=lambda key: key not in routed)
