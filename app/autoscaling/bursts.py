"""Bursts that came too fast for the fleet: what they needed, how long prompts waited, and the lulls between."""

from __future__ import annotations

import math
from collections import deque

_LULLS = 4
"""How many of the last lulls predict the next one."""
_LONGER = 1.25
"""The next lull may be this many times as long as an earlier one."""
_PRICE = 8.0
"""Idle seconds of kept replicas that one second of late requests is worth: 25% of hours for 3% of requests."""
_BACK, _OVER = 0.5, 0.25
"""Shares of a burst's need: at the first the burst has returned, below the second it is over."""


class Bursts:
    """What is known of bursts, and how many replicas to keep for the next one.

    A burst begins when prompts wait too long, or when the need reaches half of an earlier burst's, and ends
    once it falls below a quarter of that. Smaller bursts are ignored, unless prompts waited in several of them:
    then the earlier one is forgotten, so that a single large burst does not determine the fleet forever.
    """

    def __init__(self) -> None:
        self.size = 0.0  # replicas that the last one needed
        self._late_s = 0.0  # while prompts waited, of the last one where they did
        self._lulls: deque[float] = deque(maxlen=_LULLS)
        self._began: float | None = None  # of the one that goes on
        self._ended = -math.inf
        self._needed_at = self._seen_at = -math.inf
        self._peak = self._waited = 0.0
        self._smaller = 0  # ones in which prompts waited, since the last one that counted

    def see(self, now: float, need: float, *, late: bool) -> None:
        """Add what is needed now, in replicas, and whether prompts wait too long."""
        since, self._seen_at = max(now - self._seen_at, 0.0), now
        if self._began is None:
            if not late and not 0.0 < _BACK * self.size <= need:
                return
            self._began, self._peak, self._waited, since = now, 0.0, 0.0, 0.0
        self._peak = max(self._peak, need)
        self._waited += since if late else 0.0
        if late or need >= _OVER * self._peak:
            self._needed_at = now
        elif self._peak < _BACK * self.size and (not self._waited or self._smaller + 1 < _LULLS):
            self._began = None
            self._smaller += self._waited > 0.0
        else:
            self._end()

    def _end(self) -> None:
        assert self._began is not None
        if self._peak < _BACK * self.size:
            self._lulls.clear()
            self._ended = -math.inf
        self._smaller = 0
        if self._ended > -math.inf:
            self._lulls.append(self._began - self._ended)
        self.size, self._ended, self._began = self._peak, self._needed_at, None
        self._late_s = self._waited or self._late_s

    def kept(self, now: float) -> float:
        """Replicas to keep for a burst that may return; 0 if that costs more than its late requests."""
        return self.size if self._began is None and now - self._ended <= self._hold_s() else 0.0

    def _hold_s(self) -> float:
        """How long to keep them: the time that would have cost least over the last lulls; it may be 0."""

        def cost(hold_s: float) -> float:
            return sum(min(lull, hold_s) + _PRICE * self._late_s * (lull > hold_s) for lull in self._lulls)

        return min((0.0, *(_LONGER * lull for lull in self._lulls)), key=cost)
