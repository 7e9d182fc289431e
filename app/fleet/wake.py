"""Waiting for engine replicas; where they sleep, one call in Serve's queue wakes them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator
from typing import Any

AGAIN_S = 1.0
"""Between a call that a replica has answered, or that failed, and the next one, if requests still wait."""

logger = logging.getLogger(__name__)


class Wake:
    """Belongs to one ingress process and lives on its event loop.

    Serve starts a replica of a deployment that has none once a call waits in the queue of some handle. Requests
    themselves are sent only when a replica's channel is open, so this sends one call that the router holds
    until there is a replica (see ``app.routing.router``), however many requests wait. The last one of them to
    go takes the call with it.

    ``handle`` is a Serve handle of the engine deployment; ``None`` if that never sleeps.
    """

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle
        self._changed = asyncio.Event()
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None
        self._in_vain = False  # a request has waited too long, and nothing has changed since

    def changed(self) -> None:
        """A replica has become routable, or others have joined or left."""
        self._in_vain = False
        self._changed.set()

    def asleep(self, members: int) -> bool:
        """Whether it is by intent that there are no replicas among ``members``: the next request wakes one."""
        return self._handle is not None and not members and not self._in_vain

    async def until(self, there: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``there()``, asked at each change; false if that takes longer than ``limit_s``."""
        if there():
            return True
        with self._wanted():
            try:
                async with asyncio.timeout(limit_s):
                    while not there():
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                self._in_vain = True
                return False
        return True

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[None]:
        """Held for as long as some request waits for a replica."""
        self._waiting += 1
        if self._task is None and self._handle is not None:
            # An empty context: the call belongs to no single request, so none must take it along.
            self._task = asyncio.get_running_loop().create_task(
                _keep(self._handle), context=contextvars.Context()
            )
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.stop()

    def stop(self) -> None:
        """End the call, if one is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


async def _keep(handle: Any) -> None:
    while True:
        await _once(handle)
        await asyncio.sleep(AGAIN_S)


async def _once(handle: Any) -> None:
    """Until a replica has answered, or the call has failed."""
    try:
        response = handle.options(_by_reference=False).wake.remote(wait=True)
    except Exception as error:  # noqa: BLE001  (as any failure of the call below)
        logger.warning("the engines could not be called: %s: %s", type(error).__name__, error)
        return
    answer = asyncio.ensure_future(_await(response))
    try:
        # Not awaited itself: Serve raises CancelledError for calls that nobody here has cancelled.
        await asyncio.wait((answer,))
        failure = None if answer.cancelled() else answer.exception()
        if failure is not None:
            logger.warning("the engines could not be woken: %s: %s", type(failure).__name__, failure)
    finally:
        if not answer.done():
            answer.cancel()
            response.cancel()


async def _await(response: Any) -> Any:
    return await response
