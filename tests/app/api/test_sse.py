from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import Response
from virtual_time import loop_time, run_virtually

from app.api import sse
from app.api.sse import EventStream, WholeResponse
from app.fleet.generation import UnavailableError


class Connection:
    """One HTTP exchange: what was sent to the client, and when the client leaves."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self._more = asyncio.Event()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._more.set()

    async def until_sent(self, messages: int) -> None:
        while len(self.sent) < messages:
            self._more.clear()
            await self._more.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def complete(self) -> bool:
        return not self.sent[-1].get("more_body", False)


class Events:
    """A source of events that knows whether it was closed."""

    def __init__(self, *steps: bytes | Exception | asyncio.Event) -> None:
        self._steps = steps
        self.closed = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            await asyncio.sleep(0)  # closing may take a while, too
            self.closed = True


async def exchange(response: Any, connection: Connection) -> None:
    await response({"type": "http"}, connection.receive, connection.send)


def test_each_event_is_sent_by_itself_after_the_headers() -> None:
    async def main() -> None:
        events, connection = Events(b"a", b"b"), Connection()
        await exchange(EventStream(events.stream()), connection)
        assert connection.status == 200
        assert [message.get("body") for message in connection.sent] == [None, b"a", b"b", b""]
        assert connection.complete
        assert events.closed

    asyncio.run(main())


def test_an_error_before_the_first_event_has_its_own_status() -> None:
    async def main() -> None:
        events, connection = Events(UnavailableError("none")), Connection()
        await exchange(EventStream(events.stream()), connection)
        assert connection.status == 503
        assert (b"retry-after", b"1") in connection.sent[0]["headers"]
        assert json.loads(connection.body)["error"]["message"] == "none"
        assert events.closed

    asyncio.run(main())


@pytest.mark.parametrize("error", [UnavailableError("none is left"), ZeroDivisionError("secret")])
def test_a_later_error_is_an_event_that_ends_the_stream(error: Exception) -> None:
    async def main() -> None:
        events, connection = Events(b"data: 1\n\n", error), Connection()
        await exchange(EventStream(events.stream()), connection)
        first, last = connection.body.decode().removesuffix("\n\n").split("\n\n")
        assert first == "data: 1"
        told = json.loads(last.removeprefix("data: "))["error"]
        assert set(told) == {"message", "type", "param", "code"}
        assert "secret" not in told["message"]
        assert connection.complete

    asyncio.run(main())


def test_headers_and_comments_come_while_the_first_event_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEADERS_WITHIN_S", 0.01)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)

    async def main() -> None:
        gate = asyncio.Event()
        events, connection = Events(gate, b"a", UnavailableError("gone")), Connection()
        running = asyncio.create_task(exchange(EventStream(events.stream()), connection))
        await connection.until_sent(3)
        gate.set()
        await running
        assert connection.status == 200
        assert connection.body.startswith(sse.KEEP_ALIVE)
        assert connection.body.count(b"a", 0, connection.body.index(b"data:")) >= 1
        assert b'"gone"' in connection.body

    asyncio.run(main())


def test_an_error_after_the_headers_and_before_the_first_event_is_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "HEADERS_WITHIN_S", 0.01)

    async def main() -> None:
        gate = asyncio.Event()
        events, connection = Events(gate, UnavailableError("gone")), Connection()
        running = asyncio.create_task(exchange(EventStream(events.stream()), connection))
        await connection.until_sent(1)
        gate.set()
        await running
        starts = [message for message in connection.sent if message["type"] == "http.response.start"]
        assert [message["status"] for message in starts] == [200]
        last = connection.body.decode().removesuffix("\n\n").split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gone"
        assert connection.complete

    asyncio.run(main())


@pytest.mark.parametrize("pause", [sse.HEADERS_WITHIN_S / 2, 1.5 * sse.HEADERS_WITHIN_S])
@pytest.mark.parametrize("step", [b"a", UnavailableError("gone")])
def test_headers_that_leave_slowly_leave_once_and_first(pause: float, step: bytes | Exception) -> None:
    """Sending them takes as long as they may wait for the first event, which comes meanwhile."""

    async def main() -> None:
        async def stream() -> AsyncGenerator[bytes, None]:
            await asyncio.sleep(pause)
            if isinstance(step, Exception):
                raise step
            yield step

        connection = Connection()
        send = connection.send

        async def send_slowly(message: Any) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(sse.HEADERS_WITHIN_S)
            await send(message)

        connection.send = send_slowly  # type: ignore[method-assign]
        await exchange(EventStream(stream()), connection)
        starts = [message["type"] == "http.response.start" for message in connection.sent]
        assert starts[0]
        assert sum(starts) == 1
        assert connection.complete

    run_virtually(main())


def test_comments_fill_every_silence_and_no_other_time() -> None:
    """Times are those of the events: a comment each 15 s after what was sent last."""

    async def main() -> None:
        began = loop_time()

        async def stream() -> AsyncGenerator[bytes, None]:
            for name, pause in ((b"a", 0.0), (b"b", 14.0), (b"c", 34.0), (b"d", 2.0)):
                await asyncio.sleep(pause)
                yield name

        connection = Connection()
        sent = []
        send = connection.send

        async def send_at(message: Any) -> None:
            sent.append((round(loop_time() - began), message.get("body")))
            await send(message)

        connection.send = send_at  # type: ignore[method-assign]
        await exchange(EventStream(stream()), connection)
        comment = sse.KEEP_ALIVE
        assert sent[1:] == [
            *((0, b"a"), (14, b"b"), (29, comment), (44, comment), (48, b"c"), (50, b"d"), (50, b"")),
        ]

    run_virtually(main())


def test_a_client_that_does_not_read_gets_no_comments() -> None:
    async def main() -> None:
        events, connection, reads = Events(b"a", b"b"), Connection(), asyncio.Event()
        send = connection.send

        async def send_slowly(message: Any) -> None:
            await send(message)
            if message.get("body") == b"a":
                await reads.wait()

        connection.send = send_slowly  # type: ignore[method-assign]
        running = asyncio.create_task(exchange(EventStream(events.stream()), connection))
        await asyncio.sleep(4 * sse.KEEP_ALIVE_S)
        assert connection.body == b"a"
        reads.set()
        await running
        assert connection.body == b"ab"

    run_virtually(main())


class Slow(Connection):
    """A client that after each of the events ``stops_at`` reads nothing more until it is told to."""

    def __init__(self, *stops_at: bytes) -> None:
        super().__init__()
        self.reads = {event: asyncio.Event() for event in stops_at}

    async def send(self, message: Any) -> None:
        await super().send(message)
        if (reads := self.reads.get(message.get("body"))) is not None:
            await reads.wait()


def test_events_sent_past_the_others_keep_their_place() -> None:
    async def main() -> None:
        gate, connection = asyncio.Event(), Connection()
        stream = EventStream(Events(b"a", gate, b"d").stream())
        assert not stream.ready()
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        for event in (b"b", b"c"):
            assert stream.ready()
            stream.send_now(event)
        gate.set()
        await running
        assert [message.get("body") for message in connection.sent] == [None, b"a", b"b", b"c", b"d", b""]

    asyncio.run(main())


def test_events_that_leave_slowly_leave_in_their_order_and_without_comments_in_between() -> None:
    async def main() -> None:
        gate, connection = asyncio.Event(), Slow(b"b", b"c")
        stream = EventStream(Events(b"a", gate, b"c").stream())
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        stream.send_now(b"b")
        gate.set()
        for event, sent in ((b"b", b"ab"), (b"c", b"abc")):
            await asyncio.sleep(1.5 * sse.KEEP_ALIVE_S)
            assert connection.body == sent
            assert not stream.ready()
            connection.reads[event].set()
        await running
        assert connection.body == b"abc"

    run_virtually(main())


@pytest.mark.parametrize("last", [b"c", UnavailableError("gone")])
def test_an_event_that_leaves_slowly_goes_before_all_later_ones(last: bytes | Exception) -> None:
    """Nor is there a comment in between, however long it takes."""

    async def main() -> None:
        gate, connection = asyncio.Event(), Slow(b"b")
        stream = EventStream(Events(b"a", gate, last).stream())
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        stream.send_now(b"b")
        assert not stream.ready()
        await asyncio.sleep(1.5 * sse.KEEP_ALIVE_S)
        gate.set()
        await asyncio.sleep(1.5 * sse.KEEP_ALIVE_S)
        assert connection.body == b"ab"
        connection.reads[b"b"].set()
        await running
        assert connection.body.startswith(b"abc" if last == b"c" else b"abdata: ")
        assert connection.complete

    run_virtually(main())


def test_a_stream_is_ready_again_once_a_slow_event_has_left() -> None:
    async def main() -> None:
        gate, connection = asyncio.Event(), Slow(b"b")
        stream = EventStream(Events(b"a", gate).stream())
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        stream.send_now(b"b")
        await asyncio.sleep(0)
        assert not stream.ready()
        connection.reads[b"b"].set()
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        assert stream.ready()
        stream.send_now(b"c")
        gate.set()
        await running
        assert connection.body == b"abc"

    asyncio.run(main())


def test_comments_follow_what_was_sent_past_the_others() -> None:
    async def main() -> None:
        began, gate, connection = loop_time(), asyncio.Event(), Connection()
        stream = EventStream(Events(b"a", gate).stream())
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        await asyncio.sleep(10.0)
        stream.send_now(b"b")
        await connection.until_sent(4)
        assert connection.sent[3]["body"] == sse.KEEP_ALIVE
        assert loop_time() - began == pytest.approx(10.0 + sse.KEEP_ALIVE_S, abs=0.1)
        gate.set()
        await running

    run_virtually(main())


async def end(how: str, connection: Connection, running: asyncio.Task[None]) -> None:
    """Let the client leave, or the server cancel the response, and wait until it has returned."""
    if how == "disconnect":
        connection.left.set()
    else:
        running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_an_event_that_has_not_left_ends_with_its_stream(how: str) -> None:
    async def main() -> None:
        connection = Slow(b"b")
        stream = EventStream(Events(b"a", asyncio.Event()).stream())
        running = asyncio.create_task(exchange(stream, connection))
        await connection.until_sent(2)
        stream.send_now(b"b")
        await asyncio.sleep(0)
        await end(how, connection, running)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_a_response_returns_only_once_its_work_has_ended(how: str) -> None:
    async def main() -> None:
        connection = Connection()
        ended = False

        async def stream() -> AsyncGenerator[bytes, None]:
            nonlocal ended
            try:
                yield b"a"
                await asyncio.Event().wait()
            finally:
                for _ in range(100):  # turns of the loop
                    await asyncio.sleep(0)
                ended = True

        running = asyncio.create_task(exchange(EventStream(stream()), connection))
        await connection.until_sent(2)
        await end(how, connection, running)
        assert ended

    asyncio.run(main())


def test_an_error_of_sending_is_the_servers() -> None:
    async def main() -> None:
        async def send(message: Any) -> None:
            raise OSError("the socket is closed")

        with pytest.raises(OSError, match="socket is closed"):
            await EventStream(Events(b"a").stream())({"type": "http"}, Connection().receive, send)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_events_are_closed_when_the_client_leaves_or_the_server_cancels(how: str) -> None:
    async def main() -> None:
        events, connection = Events(b"a", asyncio.Event()), Connection()
        running = asyncio.create_task(exchange(EventStream(events.stream()), connection))
        await connection.until_sent(2)
        if how == "disconnect":
            connection.left.set()
            await running
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert events.closed
        assert len(connection.sent) == 2

    asyncio.run(main())


def test_a_whole_response_is_given_up_when_the_client_leaves() -> None:
    async def main() -> None:
        begun, given_up = asyncio.Event(), asyncio.Event()

        async def make() -> Response:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
            return Response()

        connection = Connection()
        running = asyncio.create_task(exchange(WholeResponse(make()), connection))
        await begun.wait()
        connection.left.set()
        await running
        assert given_up.is_set()
        assert connection.sent == []

    asyncio.run(main())
