"""Waiting for a replica; if there is none, one call in Serve's queue makes Serve start one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from app.background import Background
from app.channel.failures import answer_of, cancel_call, describe

RETRY_S = 1.0
"""Pause after a wake-up call has ended, before the next one; there is one only while requests wait."""

logger = logging.getLogger(__name__)


class ReplicaWaiter:
    """One for each ingress process; runs on its event loop.

    Serve starts the first replica of a deployment once a call waits in the queue of some handle. Requests are
    sent only when a replica's channel is open, so they never wait there. Instead one wake-up call, which the
    router holds until there is a replica (see ``app.routing.router``), stands for all waiting requests. The
    last of them to leave cancels the call.

    ``handle`` is a Serve handle of the engine deployment; ``None`` if that never scales to zero.
    """

    def __init__(self, handle: Any | None, background: Background | None = None) -> None:
        self._handle = handle
        self._background = background or Background()
        self._changed = asyncio.Event()
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None
        self._timed_out = False  # a request waited in vain, and nothing has changed since

    def notify(self) -> None:
        """A replica has become routable, or the members have changed."""
        self._timed_out = False
        self._changed.set()

    def asleep(self, num_members: int) -> bool:
        """Whether the deployment is scaled to zero on purpose, so that the next request wakes it."""
        return self._handle is not None and not num_members and not self._timed_out

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()``, evaluated after each :meth:`notify`; false after ``timeout_s`` seconds."""
        if ready():
            return True
        with self._waking():
            if await self.changed_until(ready, timeout_s):
                return True
        self._timed_out = True
        return False

    async def changed_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """As ``wait_until``, but this wakes no deployment; ``None``: without a limit."""
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Keep a wake-up call in Serve's queue while any request waits."""
        self._waiting += 1
        if self._task is None and self._handle is not None:
            self._task = self._background.start("wake-up call", _keep_calling(self._handle))
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.stop()

    def stop(self) -> None:
        """Cancel the wake-up call, if there is one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


async def _keep_calling(handle: Any) -> None:
    while True:
        await _call(handle)
        await asyncio.sleep(RETRY_S)


async def _call(handle: Any) -> None:
    """Returns once a replica has answered or the call has failed."""
    try:
        response = handle.options(_by_reference=False).wake.remote(wait=True)
    except Exception as error:  # noqa: BLE001  (like any failure of the call below)
        logger.warning("the wake-up call could not be sent: %s", describe(error))
        return
    answer = asyncio.ensure_future(answer_of(response))
    try:
        # Not awaited directly: Serve raises CancelledError for calls that nobody here has canceled.
        await asyncio.wait((answer,))
        failure = None if answer.cancelled() else answer.exception()
        if failure is not None:
            logger.warning("the wake-up call failed: %s", describe(failure))
    finally:
        if not answer.done():
            answer.cancel()
            cancel_call(response)
