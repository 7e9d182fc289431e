"""A set of replicas that expires unless it is set again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Held:
    since: float
    until: float


class TimedSet:
    """One set of replicas, replaced as a whole, that expires unless its publisher sets it again in time.

    So nothing stays in it after its publisher has died. Any thread may read or set it. Times are those of
    ``clock``, in monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}  # replaced, never changed

    def set(self, replicas: Collection[str], lasts_s: float) -> None:
        """Exactly these are in it from now on, for ``lasts_s``; those that were go on where they were.

        Raises:
            ValueError: ``lasts_s`` is negative or not a number.
        """
        if not lasts_s >= 0:
            raise ValueError(f"a set of replicas cannot last {lasts_s} s; 0 or more can be told, 0 ends it")
        now = self._clock()
        before = self._held
        self._held = {
            replica: _Held(
                before[replica].since if replica in before and before[replica].until > now else now,
                now + lasts_s,
            )
            for replica in replicas
            if lasts_s > 0
        }

    def names(self) -> frozenset[str]:
        """The names that are in it now."""
        held = self._held
        if not held:
            return frozenset()
        now = self._clock()
        return frozenset(replica for replica, one in held.items() if one.until > now)

    def longer_than(self, seconds: float) -> frozenset[str]:
        """The names that have been in it without a break for ``seconds`` or more."""
        now = self._clock()
        return frozenset(
            replica for replica, one in self._held.items() if one.until > now and now - one.since >= seconds
        )
