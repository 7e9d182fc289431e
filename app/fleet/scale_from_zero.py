"""Waiting for a replica: a call in Serve's queue makes Serve start one; fails at once if none can start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from app.background import Background
from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.failures import answer_of, cancel_call, describe, is_defect

RETRY_S = 1.0
"""Pause after a wake-up call has ended, before the next one; there is one only while requests wait."""

LOOK_S = 1.0
"""Pause between questions whether replicas cannot start; they are asked only while requests wait."""

logger = logging.getLogger(__name__)


class ReplicaWaiter:
    """One for each ingress process; runs on its event loop.

    Serve starts the first replica of a deployment once a call waits in the queue of some handle. Requests are
    sent only when a replica's channel is open, so they never wait there. Instead one wake-up call, which the
    router holds until there is a replica (see ``app.routing.router``), stands for all waiting requests. The
    last of them to leave cancels the call.

    ``handle`` is a Serve handle of the engine deployment; ``None`` if that never scales to zero.
    ``start_failure`` says why replicas cannot start, or returns an empty string. It is not called
    while there is ``any_replica``, because requests then wait for something else. While requests wait,
    ``still_waiting`` is called every second with the seconds since the first of them began to wait.
    """

    def __init__(
        self,
        handle: Any | None,
        background: Background | None = None,
        start_failure: Callable[[], Awaitable[str]] | None = None,
        any_replica: Callable[[], bool] = lambda: False,
        still_waiting: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.failure = ""
        """Why replicas cannot start, found while the last requests waited."""
        self.defects = 0
        """Wake-up calls that failed because of a defect."""
        self._handle = handle
        self._background = background or Background()
        self._start_failure = start_failure
        self._any_replica = any_replica
        self._still_waiting = still_waiting
        self._looking: asyncio.Task[None] | None = None
        self._question: asyncio.Future[str] | None = None
        # What is waited for, the first one first. It is looked at here: to wake each of the thousands of tasks
        # that may wait, so that it looks for itself, would take several times as long.
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None
        self._timed_out = False  # a request waited in vain, and nothing has changed since

    def notify(self) -> None:
        """A replica has become routable, or the members have changed."""
        self._timed_out = False
        self._check()

    def _check(self) -> None:
        for woken, ready in list(self._conditions.items()):
            if woken.done():
                continue
            try:
                wakes = ready()
            except Exception:  # noqa: BLE001 - it is raised again where the request waits
                wakes = True
            if wakes:
                woken.set_result(None)

    def asleep(self, num_members: int) -> bool:
        """Whether the deployment is scaled to zero on purpose, so that the next request wakes it."""
        return self._handle is not None and not num_members and not self._timed_out

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()``, evaluated after each :meth:`notify`.

        False after ``timeout_s`` seconds, or as soon as it is known that replicas cannot start (``failure``).
        """
        if ready():
            return True
        with self._waking():
            await self.changed_until(lambda: ready() or bool(self.failure), timeout_s)
            if ready():
                return True
        self._timed_out = True
        return False

    async def changed_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Like ``wait_until``, but without waking the deployment; ``None`` means no time limit."""
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    woken = asyncio.get_running_loop().create_future()
                    self._conditions[woken] = ready
                    try:
                        await woken
                    finally:
                        del self._conditions[woken]
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """While any request waits, keep a wake-up call in Serve's queue, and ask whether replicas can start."""
        self._waiting += 1
        if self._task is None and self._handle is not None:
            self._task = self._background.start("wake-up call", self._keep_calling(self._handle))
        if self._looking is None:
            self.failure = ""  # since the last request has left, Serve may have started one
            self._looking = self._background.start("waiting requests", self._look())
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.stop()

    def stop(self) -> None:
        """Cancel the wake-up call and the questions, if there are any."""
        for task in (self._task, self._looking):
            if task is not None:
                task.cancel()
        self._task = self._looking = None

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            failure = "" if self._any_replica() else await self._answer()
            before, self.failure = self.failure, "" if self._any_replica() else failure
            if self.failure not in ("", before):
                logger.warning("no engine replica of this model can start: %s", self.failure)
            if self.failure:
                self._check()
            await asyncio.sleep(LOOK_S)
            self._still_waiting(clock() - began)

    async def _answer(self) -> str:
        """The answer of Serve; a question that is still open is not asked again.

        One may hold a thread for a minute, and others need those threads.
        """
        if self._start_failure is None:
            return ""
        if self._question is None or self._question.done():
            self._question = asyncio.ensure_future(self._start_failure())
        return await asyncio.shield(self._question)

    async def _keep_calling(self, handle: Any) -> None:
        while True:
            await self._call(handle)
            await asyncio.sleep(RETRY_S)

    async def _call(self, handle: Any) -> None:
        """Returns once a replica has answered or the call has failed; the next one then follows."""
        call = EngineCall(EngineCalls.wake, wait=True)
        try:
            response = call.send(handle.options(_by_reference=False).wake)
        except Exception as error:  # noqa: BLE001  (like any failure of the call below, it is counted)
            self._failed(call, "could not be sent", error)
            return
        answer = asyncio.ensure_future(answer_of(response))
        try:
            # Not awaited directly: Serve raises CancelledError for calls that nobody here has canceled.
            await asyncio.wait((answer,))
            failure = None if answer.cancelled() else answer.exception()
            if failure is not None:
                self._failed(call, "failed", failure)
        finally:
            if not answer.done():
                answer.cancel()
                cancel_call(response)

    def _failed(self, call: EngineCall, how: str, error: BaseException) -> None:
        defect = is_defect(error, call)
        self.defects += defect
        logger.warning("the wake-up call %s: %s", how, describe(error), exc_info=error if defect else None)
