"""Whether an ingress keeps up: how late its event loop is, or how long frames or requests wait for it."""

from __future__ import annotations

import math

CAUGHT_UP = 0.4
"""An ingress has caught up when its lag is below this share of the limit."""

HOLD_S = 1.0
"""How long the lag must stay beyond the limit, or within ``CAUGHT_UP`` of it, to be more than a moment's."""


class LoopLag:
    """Judged a few times a second by :meth:`look`; times are in seconds.

    ``behind`` becomes true when every look for ``HOLD_S`` finds more than ``limit_s``. It becomes false when
    every look for as long finds less than ``CAUGHT_UP`` of it. A single pause, such as that of a stopped
    process, changes nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seconds = 0.0
        self.behind = False
        self._since = math.inf  # the lag has been on the other side of its bound

    def look(self, now: float, lag_s: float) -> None:
        """Take in the lag at ``now``."""
        self.seconds = lag_s
        crossed = lag_s < CAUGHT_UP * self.limit_s if self.behind else lag_s > self.limit_s
        if not crossed:
            self._since = math.inf
        elif self._since == math.inf:
            self._since = now
        elif now - self._since >= HOLD_S:
            self.behind, self._since = not self.behind, math.inf
