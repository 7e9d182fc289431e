"""An event loop whose clock jumps: while nothing is ready, it goes on to the next timer at once.

So a test that lets a second pass takes none, a neighbor that keeps the processor busy changes nothing, and what
has not happened after a while has really not happened.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

START_S = 1000.0
"""Where the clock begins: 0 passes for "never" in places."""

LIMIT_S = 120.0
"""Of the loop's seconds, after which a test has failed."""

TURN_S = 1e-5
"""What a turn of the loop takes: code that only yields sees time pass, too."""


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Lets ``now`` pass instead of waiting; waits only where no timer is set, so for another thread."""

    now = START_S

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        self.now += TURN_S if ready else max(timeout, TURN_S)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def loop_time() -> float:
    """The running loop's clock, for parts that take one."""
    return asyncio.get_running_loop().time()


def run_virtually(test: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, in at most ``LIMIT_S`` of the loop's seconds."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await test

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(limited())
