"""How long the other side has been silent, judged by an observer that may itself have been stopped or late."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class Silence:
    """Seconds without progress, as seen by an observer that looks about every ``look_s`` seconds.

    Between two looks, at most ``2 * look_s`` count: while the observer's process is stopped or starved, it
    cannot know whether the other side is silent, and messages may wait unread. ``clock`` is in monotonic
    seconds.
    """

    def __init__(self, look_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = 2.0 * look_s
        self._clock = clock
        self._looked_at = clock()
        self._seen: Hashable = None
        self.seconds = 0.0

    def look(self, seen: Hashable) -> float:
        """The seconds of silence; ``seen`` is a value that changes with each sign of life, such as a count."""
        now = self._clock()
        past, self._looked_at = now - self._looked_at, now
        if seen != self._seen:
            self._seen, self.seconds = seen, 0.0
        else:
            self.seconds += min(past, self._most)
        return self.seconds
