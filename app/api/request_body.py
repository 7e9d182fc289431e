"""Read and check the JSON body of a request: large ones in a thread, and never more than fits the memory."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from app.api.errors import ApiError, too_many_bodies
from app.api.fair_threads import FairThreads
from app.api.json_pieces import MAX_DEPTH, MAX_VALUES, TooManyValuesError, parse_json
from app.fleet.loop_pacer import LoopPacer

MAX_BODY_BYTES = 8 * 1024 * 1024

MAX_HELD_BYTES = 128 * 1024 * 1024
"""Bodies that one ingress replica reads or waits to parse, together; small ones do not count.

A client may hold as much of it as it leaves free: one alone takes half, two take a third each. So there is
always room for another.
"""

INLINE_BYTES = 16 * 1024
"""Bodies up to this size are parsed on the event loop: in 5 ms at worst, nearly always in less than 0.1 ms."""

WITHIN_S = 120.0
"""Seconds in which a body must be complete: clients that send slowly would hold what others need."""

_TICKS = 24
"""Parts in which they are counted. A busy event loop, however long, costs a client one part: what it has sent
meanwhile waits for this server."""

MAX_THREADS = 2
"""Bodies parsed at the same time: threads share one interpreter, so more would only make each slower."""

BEGIN_TURNS = 8
"""Turns of the event loop from one begin to the next. Serve's (uvloop) accepts one connection in each, and
learns a few later that its client has left. With a begin in each, /health would wait in the kernel behind a
whole crowd, and all who have left would begin."""

_PIECE_BYTES = 1 << 18  # decoded at once

T = TypeVar("T")


class BodyReader:
    """The bodies of one ingress replica's requests; ``sender`` returns which client a request is from.

    One request begins every ``BEGIN_TURNS`` turns of the event loop, clients round robin: a begin takes a
    millisecond or more, and running requests, health checks, and other clients' requests must not wait until
    all of a crowd have begun. ``check_wait`` gets the seconds that a client's requests wait to begin, and may
    raise; so may ``check``, by what is known of a request without its body. ``clock`` is in monotonic seconds.
    """

    def __init__(
        self,
        sender: Callable[[Request], str] = lambda request: "",
        check_wait: Callable[[float], None] = lambda waited_s: None,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.threads = FairThreads(MAX_THREADS, "bodies")  # other work on large requests shares them
        self._sender = sender
        self._held: Counter[str] = Counter()  # bytes, by client
        self._check_wait = check_wait
        self._check = check
        self._clock = clock
        self._begins = LoopPacer(1, clock, every=BEGIN_TURNS)

    @property
    def held_bytes(self) -> int:
        """Bytes held for all clients."""
        return self._held.total()

    @property
    def wait_s(self) -> float:
        """The longest that any request has waited to begin; 0 if none waits."""
        return self._begins.lag_s

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """What ``parse`` makes of the body, a JSON object, once it is this request's turn to begin.

        A large body is parsed in a thread.

        Raises:
            ApiError: that of ``check_wait`` or ``check``; 413 above ``MAX_BODY_BYTES``, before all of it is
                read, or above ``MAX_VALUES`` values; 400 if it is not a JSON object; 408 if it is not complete
                within ``WITHIN_S``; 503 beyond the client's share of ``MAX_HELD_BYTES``.
            InvalidRequestError: from ``parse``.
        """
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        sender, held = self._sender(request), 0
        try:
            async with _in_time():
                async for chunk in request.stream():
                    if len(body) + len(chunk) > MAX_BODY_BYTES:
                        raise _too_large()
                    if len(body) + len(chunk) > INLINE_BYTES:
                        self._hold(sender, len(chunk))
                        held += len(chunk)
                    body += chunk
            await self._begin(request, sender)
            if len(body) <= INLINE_BYTES:
                return parse(parse_json_object(body))
            return await self.threads.run(sender, lambda: parse(parse_json_object(body)))
        except ClientDisconnect as error:
            raise ApiError(400, "the client disconnected before the body was complete") from error
        finally:
            self._held[sender] -= held
            if not self._held[sender]:
                del self._held[sender]

    async def _begin(self, request: Request, sender: str) -> None:
        """Wait for a turn; a request that will be refused takes no place in the queue, and is not parsed."""
        self._check(request)
        self._check_wait(self._begins.waited_s(sender))
        arrived = self._clock()
        await self._begins.enter(sender)
        self._check_wait(self._clock() - arrived)
        self._check(request)

    def _hold(self, sender: str, size: int) -> None:
        own, total = self._held[sender] + size, self.held_bytes + size
        if own > MAX_HELD_BYTES - total:
            raise too_many_bodies(MAX_HELD_BYTES, total - own, own)
        self._held[sender] = own


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Cancel the reading of a body that is not complete within ``WITHIN_S``.

    Raises:
        ApiError: 408.
    """
    loop, left = asyncio.get_running_loop(), _TICKS + 1
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(WITHIN_S / _TICKS, tick)
        else:
            limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            tick()
            yield
    except TimeoutError as error:
        raise ApiError(
            408, f"the body was not complete within {WITHIN_S:g} s", code="request_timeout"
        ) from error
    finally:
        if timer is not None:
            timer.cancel()


def parse_json_object(body: bytes | bytearray) -> dict[str, Any]:
    """``body`` as strict JSON: UTF-8, no NaN or Infinity, an object at the top.

    Raises:
        ApiError: 400 says what is wrong and where; 413 if it has more than ``MAX_VALUES`` values.
    """
    try:
        value = parse_json(_decoded(body))
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise ApiError(
            400, f"the body nests deeper than {MAX_DEPTH} lists and objects", code="invalid_json"
        ) from error
    except TooManyValuesError as error:
        raise ApiError(
            413,
            f"the body has more than {MAX_VALUES} strings, objects, and lists; send fewer messages or prompts",
            code="request_too_large",
        ) from error
    except ValueError as error:  # also a number with thousands of digits
        reason = str(error).split(";")[0]
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _decoded(body: bytes | bytearray) -> str:
    """``body`` as text, piece by piece.

    Raises:
        UnicodeDecodeError: it is not UTF-8; ``start`` counts from the beginning of ``body``.
    """
    if len(body) <= _PIECE_BYTES:
        return body.decode("utf-8")
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = []
    for begin in range(0, len(body), _PIECE_BYTES):
        pending = len(decoder.getstate()[0])  # bytes of a character that began in the piece before
        try:
            pieces.append(decoder.decode(body[begin : begin + _PIECE_BYTES], begin + _PIECE_BYTES >= len(body)))
        except UnicodeDecodeError as error:
            error.start += begin - pending
            raise
    return "".join(pieces)


def _too_large() -> ApiError:
    return ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes", code="request_too_large")
