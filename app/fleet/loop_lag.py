"""Whether an ingress keeps up: how late its event loop is, and how long the engines' frames wait for it."""

from __future__ import annotations

import math

BEHIND_S = 0.5
"""Lag beyond which an ingress that does not catch up takes no new requests."""

CAUGHT_UP_S = 0.2
HOLD_S = 1.0
"""How long the lag must stay beyond ``BEHIND_S``, or within ``CAUGHT_UP_S``, to be more than a moment's."""


class LoopLag:
    """Judged a few times a second by :meth:`look`; times are in seconds.

    ``behind`` begins when every look for ``HOLD_S`` finds more than ``BEHIND_S``. It ends when every look for
    as long finds less than ``CAUGHT_UP_S``. A single pause, such as that of a stopped process, changes nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.behind = False
        self._since = math.inf  # the lag has been on the other side of its bound

    def look(self, now: float, lag_s: float) -> None:
        """Take in the lag at ``now``."""
        self.seconds = lag_s
        crossed = lag_s < CAUGHT_UP_S if self.behind else lag_s > BEHIND_S
        if not crossed:
            self._since = math.inf
        elif self._since == math.inf:
            self._since = now
        elif now - self._since >= HOLD_S:
            self.behind, self._since = not self.behind, math.inf
