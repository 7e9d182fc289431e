"""The load generator of live runs, against a server that answers well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from loadtests.experiments.routing_live.client import Client, Reply
from loadtests.experiments.routing_live.traffic import Ask, Shape, Traffic

TRAFFIC = Traffic(Shape(groups=2, output=(20, 20)), ["one", "two"], 64)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [], **fields}).encode() + b"\n\n"


TOKEN = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}])
USAGE = event(
    usage={"prompt_tokens": 440, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 400}}
)
GOOD = b"HTTP/1.1 200 OK\r\n\r\n" + TOKEN + TOKEN + USAGE + b"data: [DONE]\n\n"
SHORT = GOOD.replace(b'"completion_tokens": 20', b'"completion_tokens": 19')
CUT = b"HTTP/1.1 200 OK\r\n\r\n" + TOKEN
BUSY = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": {"message": "too many", "type": "server_error"}}'
FAILING = b"HTTP/1.1 200 OK\r\n\r\n" + TOKEN + event(error={"message": "the engine gave up"})


def serve(answer: bytes, use: Callable[[Client], Coroutine[Any, Any, Any]], limit_s: float = 10.0) -> Any:
    """Run ``use`` with a client of a server that says ``answer`` to everything."""
    ended: list[int] = []

    async def everything() -> Any:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            if not answer:
                await asyncio.sleep(30)
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = Client(f"http://127.0.0.1:{port}", TRAFFIC, limit_s, lambda: ended.append(1))
            return await use(client)

    result = asyncio.run(everything())
    assert ended
    return result


def one(answer: bytes, limit_s: float = 10.0) -> Reply:
    due = time.perf_counter()
    reply: Reply = serve(answer, lambda client: client.ask(Ask(0.0, 1, "Why?", 20), due), limit_s)
    return reply


def test_a_good_answer_says_all() -> None:
    reply = one(GOOD)
    assert (reply.status, reply.fault, reply.name) == (200, "", "chatcmpl-1")
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached) == (440, 20, 400)
    assert reply.due < reply.first <= reply.ended


@pytest.mark.parametrize(
    ("answer", "status", "fault"),
    [
        (BUSY, 503, "too many"),
        (CUT, 200, "no whole stream"),
        (SHORT, 200, "19 tokens instead of 20"),
        (FAILING, 200, "the engine gave up"),
        (b"nonsense\r\n", 0, "Error"),
    ],
)
def test_whatever_else_comes_is_a_fault(answer: bytes, status: int, fault: str) -> None:
    reply = one(answer)
    assert reply.status == status
    assert fault in reply.fault
    assert reply.ended == 0.0


def test_a_server_that_says_nothing_is_given_up() -> None:
    reply = one(b"", limit_s=0.1)
    assert reply.fault.startswith("TimeoutError")
    assert (reply.status, reply.first, reply.ended) == (0, 0.0, 0.0)


def test_nobody_listening_is_a_fault() -> None:
    client = Client("http://127.0.0.1:1", TRAFFIC, 10.0, lambda: None)
    reply = asyncio.run(client.ask(Ask(0.0, 0, "Why?", 20), 0.0))
    assert reply.status == 0
    assert reply.fault


def test_an_open_loop_waits_for_no_answer() -> None:
    """All are sent at their times although none is ever answered."""
    asks = [Ask(0.01 * number, 0, "Why?", 20) for number in range(5)]

    async def use(client: Client) -> list[Reply]:
        return await client.open_loop(asks, time.perf_counter())

    replies = serve(b"", use, limit_s=0.3)
    assert [reply.ask for reply in replies] == asks
    assert all(reply.fault for reply in replies)


def test_a_closed_loop_asks_again_until_enough_are_answered() -> None:
    replies = serve(GOOD, lambda client: client.closed_loop(2, 5, 1))
    assert len(replies) in (5, 6)
    assert {reply.ask.group for reply in replies} == {0}
    assert [reply.ended for reply in replies] == sorted(reply.ended for reply in replies)
