"""How much time each client's grammars may take to follow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

TOKEN_S = 0.002
"""Processor time that following a grammar may take for each token, in the long run; most take a hundredth."""

BURST_S = 0.1
"""What all sequences of a client together may take beyond that."""

SHARE = 0.05
"""The part of the time by which this grows again, besides what other tokens leave over."""

KEPT = 1024
"""Clients whose budgets are kept."""


class FollowBudget:
    """The budget of one client, whatever its forms; only the engine's thread spends it.

    A step, and so every other sequence, waits while a grammar is followed. Only sequences that take too long
    themselves fail. While a client owes time, its new requests with grammars are refused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = BURST_S
        self._at = clock()

    def spend(self, took_s: float, tokens: int) -> bool:
        """Account for the time of following ``tokens``; whether the sequence may go on."""
        now, allowed_s = self._clock(), TOKEN_S * max(tokens, 1)
        self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._at) + allowed_s - took_s)
        self._at = now
        return self._left_s >= 0 or took_s <= allowed_s

    def owed_s(self) -> float:
        """Seconds until no time is owed; 0 if none is."""
        return max(0.0, -self._left_s / SHARE - (self._clock() - self._at))


class FollowBudgets:
    """The budgets of the clients that used one last; one that owes time is forgotten last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: OrderedDict[str, FollowBudget] = OrderedDict()

    def of(self, client: str) -> FollowBudget:
        """The budget of ``client``."""
        found = self._of.pop(client, None) or FollowBudget(self._clock)
        self._of[client] = found
        if len(self._of) > KEPT:
            oldest = next(iter(self._of))
            del self._of[next((name for name, budget in self._of.items() if not budget.owed_s()), oldest)]
        return found
