"""Responses that end when the client disconnects: server-sent events, or one body that takes time."""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.errors import ApiFault, fault_of

HEADERS_WITHIN_S = 1.0
"""Send the headers after this long without an event; until then an error gets its own HTTP status."""

KEEP_ALIVE_S = 15.0
"""After this long without an event, a comment keeps proxies from closing the connection."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DIRECT_SEND = "quire.direct_send"
"""In an ASGI scope, the server's own ``send``. No middleware here changes a body, so that events need not pass
them once the headers are out. ``send_now`` calls it outside any task, so it may wait for futures only."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def error_event(fault: ApiFault) -> bytes:
    """An error in OpenAI's format, as an event."""
    return b"data: " + fault.to_json().encode() + b"\n\n"


class EventStream:
    """An ASGI response that sends ``events`` as they come; each is one or more whole events.

    An error before the first event becomes an HTTP error. A later one becomes the event that ``error`` makes of
    it, which ends the stream. When the client disconnects, or the server cancels, ``events`` is closed before
    this returns. While ``events`` waits for something to send, ``send_now`` may send an event past it.
    ``on_begin`` is called when the headers go out with status 200.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error: Callable[[ApiFault], bytes] = error_event,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._events = events
        self._error = error
        self._on_begin = on_begin
        self._begun = False
        self._beginning = asyncio.Lock()
        self._sending = False  # an event, or the end
        self._sent = -math.inf  # when, on the loop's clock
        self._direct: Send | None = None
        self._late: asyncio.Task[None] | None = None  # the end of a ``send_now``

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _run_while_connected(receive, self._produce(scope, receive, send), lambda: self._wait(send))
        finally:
            if self._late is not None:
                self._late.cancel()
                await asyncio.gather(self._late, return_exceptions=True)

    def ready(self) -> bool:
        """Whether ``send_now`` may be called: the headers are out, and no event is on its way."""
        return self._begun and not self._sending and not self._beginning.locked()

    def send_now(self, event: bytes) -> None:
        """Send ``event``, one or more whole events, without a turn of the stream's task.

        To a client that reads slowly, a task sends the rest; the stream is not ``ready`` before that is done.
        """
        assert self._direct is not None, "it is ready"
        self._sending = True
        steps = self._direct({"type": "http.response.body", "body": event, "more_body": True}).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:  # nearly always
            self._note_sent()
        else:
            self._late = asyncio.get_running_loop().create_task(self._send_rest(waits_for, steps))

    async def _send_rest(self, waits_for: Any, steps: Generator[Any, None, None]) -> None:
        await _continue(waits_for, steps)
        self._note_sent()

    def _note_sent(self) -> None:
        self._sent = asyncio.get_running_loop().time()
        self._sending = False

    async def _settle(self) -> None:
        """Call before sending another event: waits until what ``send_now`` began has been sent."""
        late, self._late = self._late, None
        if late is not None:
            await late
        self._sending = True

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = direct = scope.get(DIRECT_SEND, send)
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._settle()
                    if not self._begun or self._beginning.locked():
                        await self._begin(send)
                    await direct({"type": "http.response.body", "body": event, "more_body": True})
                    self._note_sent()
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the log has it
                fault = fault_of(error)
                await self._settle()
                if not self._begun:
                    await fault.to_response(scope.get("path", ""))(scope, receive, send)
                    return
                await self._begin(send)
                await send({"type": "http.response.body", "body": self._error(fault), "more_body": True})
        await self._settle()
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        async with self._beginning:  # the second caller waits until the headers are sent
            if not self._begun:
                self._begun = True
                self._on_begin()
                await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})

    async def _wait(self, send: Send) -> float:
        """Called after the headers' time, then as this asks: the seconds until the next call."""
        if self._sending:  # to a client that reads slowly
            return KEEP_ALIVE_S
        if not self._begun:
            await self._begin(send)
            return KEEP_ALIVE_S
        time = asyncio.get_running_loop().time
        quiet = time() - self._sent
        if quiet < KEEP_ALIVE_S:
            return KEEP_ALIVE_S - quiet
        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self._sent = time()
        return KEEP_ALIVE_S


class WholeResponse:
    """An ASGI response whose content ``make`` prepares; it is canceled when the client goes away."""

    def __init__(self, make: Coroutine[Any, Any, Response]) -> None:
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _run_while_connected(receive, self._produce(scope, receive, send), None)

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._make
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the log has it
            response = fault_of(error).to_response(scope.get("path", ""))
        await response(scope, receive, send)


async def _run_while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, None],
    on_idle: Callable[[], Awaitable[float]] | None,
) -> None:
    """Run ``work`` to its end, or cancel it when the client goes away or this is canceled.

    Returns only once ``work`` has ended, so that what it held is released by then. The body must have been
    read from ``receive`` before. ``on_idle`` is called after ``HEADERS_WITHIN_S``, then as it asks.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    wait: float | None = None if on_idle is None else HEADERS_WITHIN_S
    try:
        while True:
            done, _ = await asyncio.wait({working, watching}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            assert on_idle is not None
            wait = await on_idle()
        if working in done:
            await working  # its error, if any, is the server's
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


@types.coroutine
def _continue(waits_for: Any, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The rest of ``steps``, which has been begun outside of any task and waits for ``waits_for``."""
    try:
        yield waits_for
        yield from steps
    finally:
        steps.close()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
