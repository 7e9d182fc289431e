"""The client of the load tests, against servers that answer well, badly, slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from app.api.choices import TextDelta
from app.api.openai_responses import ChunkWriter, Envelope, Usage
from loadtests.client import Client, Outcome, stream_blocking, vanish

WRITER = ChunkWriter(Envelope("id", 0, "m", "fp"), chat=True, include_usage=True, continuous_usage=False)
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
DONE = b"data: [DONE]\n\n"
ROLE, USED = WRITER.role(), WRITER.usage(USAGE)
ONE = WRITER.delta(TextDelta(0, "Grüß", None, 1, 0), USAGE)
TWO = WRITER.delta(TextDelta(0, " dich", "length", 2, 0), USAGE)
WHOLE = [ROLE, ONE, TWO, USED, DONE]
FAILING = b"data: " + json.dumps({"error": {"message": "no engine"}}).encode() + b"\n\n"
MESSAGES = [{"role": "user", "content": "?"}]


class Server:
    """Says ``answer`` to each request, then keeps the connection; notes what clients do."""

    def __init__(
        self, answer: bytes, status: int = 200, block: int = 10_000, hold: bool = False, clients: int = 1
    ) -> None:
        self.answer, self.status, self.block, self.hold = answer, status, block, hold
        self.clients = clients
        self.connections = 0
        self.bodies: list[dict[str, Any]] = []
        self.left = 0  # connections that the client has closed
        self.asked, self.all_left = asyncio.Event(), asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.asked.set()
                writer.write(
                    b"HTTP/1.1 %d X\r\nx-quire-instance: m\r\ntransfer-encoding: chunked\r\n\r\n" % self.status
                )
                for start in range(0, len(self.answer), self.block):
                    part = self.answer[start : start + self.block]
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                if self.hold:
                    await reader.read()
                    break
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.left += 1
            if self.left == self.clients:
                self.all_left.set()
            writer.close()


def with_server(server: Callable[[], Server], use: Callable[[Server, str], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``use`` with a server and its address."""

    async def everything() -> Any:
        made = server()
        async with await asyncio.start_server(made.handle, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await asyncio.wait_for(use(made, f"http://127.0.0.1:{port}"), 60)

    return asyncio.run(everything())


def chat(answer: bytes, status: int = 200, block: int = 10_000, **how: Any) -> Outcome:
    async def use(_: Server, url: str) -> Outcome:
        async with Client(url, "m") as client:
            return await client.chat(MESSAGES, 2, **how)

    outcome: Outcome = with_server(lambda: Server(answer, status, block), use)
    return outcome


@pytest.mark.parametrize("block", [1, 7, 100, 10_000])
def test_blocks_of_any_size_give_the_same_answer(block: int) -> None:
    outcome = chat(b": keep-alive\n\n" + b"".join(WHOLE), block=block)
    assert (outcome.status, outcome.fault, outcome.text) == (200, "", "Grüß dich")
    assert (outcome.tokens, outcome.usage["prompt_tokens"], outcome.finish_reason) == (2, 5, "length")
    assert outcome.complete
    assert outcome.whole
    assert outcome.began < outcome.first <= outcome.last <= outcome.ended
    assert len(outcome.gaps) == len(outcome.events) - 1


@pytest.mark.parametrize(
    ("answer", "status", "fault"),
    [
        (b"".join(WHOLE[:-1]), 200, "no [DONE]"),
        (b"".join([ROLE, ONE, DONE]), 200, "finish reason"),
        (ROLE + FAILING, 200, "no engine"),
        (b"data: {nonsense\n\n", 200, "JSONDecodeError"),
        (b"", 200, "no [DONE]"),
        (b'{"error": {"message": "too many"}}', 503, "status 503: too many"),
        (b"<html>bad gateway</html>", 502, "bad gateway"),
    ],
)
def test_whatever_else_comes_is_a_fault(answer: bytes, status: int, fault: str) -> None:
    outcome = chat(answer, status)
    assert outcome.status == status
    assert fault in outcome.fault
    assert not outcome.complete


def test_another_servers_answer_is_a_fault() -> None:
    async def use(_: Server, url: str) -> Outcome:
        async with Client(url, "mine") as client:
            return await client.chat(MESSAGES, 2)

    outcome = with_server(lambda: Server(b"".join(WHOLE)), use)
    assert outcome.fault == "an answer of another server, m"
    assert not outcome.complete


def test_other_tokens_than_asked_for_are_not_whole() -> None:
    async def use(_: Server, url: str) -> Outcome:
        async with Client(url, "m") as client:
            return await client.chat(MESSAGES, 3)

    outcome = with_server(lambda: Server(b"".join(WHOLE)), use)
    assert outcome.complete
    assert not outcome.whole


def test_connections_are_kept_alive() -> None:
    async def use(server: Server, url: str) -> None:
        async with Client(url, "m") as client:
            for _ in range(3):
                assert (await client.chat(MESSAGES, 2)).whole
        assert server.connections == 1
        assert [body["max_tokens"] for body in server.bodies] == [2, 2, 2]

    with_server(lambda: Server(b"".join(WHOLE)), use)


def test_completions_find_nothing_cached() -> None:
    async def use(server: Server, url: str) -> None:
        async with Client(url, model="m") as client:
            for _ in range(2):
                await client.complete("Once", 2)
        one, other = server.bodies
        assert one.pop("cache_salt") != other.pop("cache_salt")
        assert one == other
        assert (one["model"], one["prompt"], one["stream"]) == ("m", "Once", True)

    with_server(lambda: Server(b"".join(WHOLE)), use)


@pytest.mark.parametrize("how", [{"leave_after": 1}, {"leave_s": 0.01}])
def test_a_client_that_leaves_hangs_up(how: dict[str, Any]) -> None:
    async def use(server: Server, url: str) -> None:
        async with Client(url, "m") as client:
            outcome = await client.chat(MESSAGES, 2, **how)
            await server.all_left.wait()  # while the client itself stays
        assert server.left == 1
        assert outcome.fault

    with_server(lambda: Server(ROLE + ONE, hold=True), use)


def test_canceling_hangs_up() -> None:
    async def use(server: Server, url: str) -> None:
        async with Client(url, "m") as client:
            stream = asyncio.ensure_future(client.chat(MESSAGES, 2))
            await server.asked.wait()
            stream.cancel()
            await server.all_left.wait()
        assert server.left == 1

    with_server(lambda: Server(ROLE, hold=True), use)


def test_all_that_vanish_have_been_there_and_hang_up() -> None:
    async def use(server: Server, url: str) -> None:
        amid = await vanish(url, 20, seed=7, instance="m")
        assert len(server.bodies) == server.connections == 20
        await server.all_left.wait()
        assert 0 < amid <= 20
        assert [body["stream"] for body in server.bodies].count(False) == 7
        assert all(body["stream"] == ("stream_options" in body) for body in server.bodies)

    with_server(lambda: Server(ROLE + ONE * 10, hold=True, clients=20), use)


def test_a_slow_reader_rests_after_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr("loadtests.client.asyncio.sleep", rest)
    assert chat(b"".join(WHOLE), pause_s=0.5).whole
    assert rests.count(0.5) == len(WHOLE)


def test_a_server_that_says_nothing_is_given_up() -> None:
    async def use(_: Server, url: str) -> Outcome:
        async with Client(url, "m", limit_s=0.1) as client:
            return await client.chat(MESSAGES, 2)

    outcome = with_server(lambda: Server(b"", hold=True), use)
    assert outcome.fault.startswith("TimeoutError")
    assert outcome.first == outcome.last == 0.0


def test_nobody_listening_is_a_fault() -> None:
    async def use() -> Outcome:
        async with Client("http://127.0.0.1:1") as client:
            return await client.complete("Once", 2)

    outcome = asyncio.run(use())
    assert outcome.status == 0
    assert outcome.fault.startswith("ConnectError")


def test_greenlets_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["temperature"] == 0.7
        return httpx.Response(200, content=b"".join(WHOLE))

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
        outcome = stream_blocking(http, "/v1/x", Outcome(model="m", asked=2), temperature=0.7)
    assert outcome.whole
    refusing = httpx.MockTransport(lambda _: httpx.Response(503, content=b'{"error": {"message": "busy"}}'))
    with httpx.Client(base_url="http://x", transport=refusing) as http:
        assert stream_blocking(http, "/v1/x", Outcome()).fault == "status 503: busy"
