"""Bodies: where they are parsed, what all of them together may take, and what is given back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engine_client_setting import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from virtual_time import run_virtually

from app.api import request_body
from app.api.chat_messages import MAX_MESSAGES
from app.api.errors import ERROR_HANDLERS, ApiError
from app.api.openai_types import parse_chat, parse_completion
from app.api.request_body import INLINE_BYTES, MAX_BODY_BYTES, MAX_THREADS, BodyReader, parse_json_object

MESSAGE = {"role": "user", "content": ""}


def run(
    bodies: BodyReader, parse: Callable[[dict[str, Any]], Any], work: Callable[..., Awaitable[None]]
) -> None:
    """Run ``work`` with a client of a server that only reads bodies."""

    async def answer(request: Request) -> Response:
        await bodies.read(request, parse)
        return JSONResponse({})

    async def main() -> None:
        api = Starlette(routes=[Route("/", answer, methods=["POST"])], exception_handlers=ERROR_HANDLERS)
        api.state.get_server = lambda: SimpleNamespace(count_refusal=lambda *_: None)
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await work(client)

    asyncio.run(main())


@pytest.mark.parametrize(("padding", "inline"), [(0, True), (INLINE_BYTES, False)])
def test_a_large_body_is_parsed_and_checked_off_the_loop(padding: int, inline: bool) -> None:
    threads = []
    bodies = BodyReader()

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post("/", content=b"{}" + b" " * padding)).status_code == 200
        assert (threads[0] == threading.get_ident()) is inline

    run(bodies, lambda body: threads.append(threading.get_ident()), work)
    assert bodies.held_bytes == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": [MESSAGE] * 280_000}, 413, ["100000"]),
        ({"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, 400, [str(MAX_MESSAGES)]),
        ({"messages": [[]] * 2_700_000}, 413, ["100000"]),
        ({"messages": {"a": [[[]]] * 500_000}}, 413, ["100000"]),
    ],
)
def test_many_small_values_are_refused(body: dict[str, Any], status: int, words: list[str]) -> None:
    content = json.dumps(body, separators=(",", ":")).encode()
    assert len(content) <= MAX_BODY_BYTES
    bodies = BodyReader()

    async def work(client: httpx.AsyncClient) -> None:
        response = await client.post("/", content=content)
        assert response.status_code == status
        for word in words:
            assert word in response.json()["error"]["message"]

    run(bodies, parse_chat, work)
    assert bodies.held_bytes == 0


def test_bodies_that_take_too_much_together_get_503_and_small_ones_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "MAX_HELD_BYTES", 130_000)
    large = b'{"prompt": "' + b"a" * 60_000 + b'"}'
    bodies = BodyReader()

    async def work(client: httpx.AsyncClient) -> None:
        go_on, halfway = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield large[:50_000]
            halfway.set()  # whoever asks for the next piece has taken in this one
            await go_on.wait()
            yield large[50_000:]

        # This transport hands the whole request over at once, so the slow body goes in by itself.
        first = asyncio.create_task(bodies.read(_request(slowly()), parse_completion))
        await halfway.wait()
        refused = await client.post("/", content=large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "unavailable"
        assert (await client.post("/", content=b'{"prompt": "a"}')).status_code == 200
        assert bodies.held_bytes == 50_000
        go_on.set()
        assert len((await first).prompts[0]) == 60_000
        assert (await client.post("/", content=large)).status_code == 200

    run(bodies, parse_completion, work)
    assert bodies.held_bytes == 0


def test_a_client_may_hold_as_much_as_it_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_HELD_BYTES", 600_000)
    bodies = BodyReader(lambda request: str(request.headers.get("x-quire-client")))

    async def hold(client: str, size: int) -> asyncio.Task[Any]:
        """A body of which ``size`` bytes have arrived, and the rest never does."""
        halfway = asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            yield b" " * size
            halfway.set()
            await asyncio.Event().wait()

        reading = asyncio.create_task(bodies.read(_request(chunks(), client), parse_completion))
        waiting = asyncio.create_task(halfway.wait())
        await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return reading

    async def main() -> None:
        tasks = [await hold("greedy", 100_000) for _ in range(4)]
        assert [task.done() for task in tasks] == [False, False, False, True]  # half of all
        with pytest.raises(ApiError, match="400000 of 600000 bytes, 400000 of them from this client") as caught:
            await tasks[3]
        assert (caught.value.fault.status, caught.value.fault.retry_after_s) == (503, 1)
        others = [await hold("other", 100_000), await hold("another", 50_000)]
        assert [task.done() for task in others] == [False, False]
        assert bodies.held_bytes == 450_000
        assert (await hold("other", 100_000)).done()
        assert not (await hold("third", 70_000)).done()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert (bodies.held_bytes, bodies._held) == (0, {})


def test_a_body_that_does_not_end_is_given_up_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "WITHIN_S", 30.0)
    bodies = BodyReader()

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 50_000
            await asyncio.sleep(request_body.WITHIN_S / 10)

    async def main() -> None:
        with pytest.raises(ApiError, match="not complete within 30 s") as caught:
            await bodies.read(_request(trickle()), parse_completion)
        assert (caught.value.fault.status, caught.value.fault.code) == (408, "request_timeout")

    run_virtually(main())
    assert bodies.held_bytes == 0


def test_only_the_time_that_the_client_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent may have to wait for a busy event loop."""
    monkeypatch.setattr(request_body, "WITHIN_S", 0.24)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def sent() -> AsyncIterator[bytes]:
            for piece in (b'{"prompt"', b":", b'"a"}'):
                yield piece
                arrived = loop.create_future()
                loop.call_soon(time.sleep, request_body.WITHIN_S)
                loop.call_later(0.0, arrived.set_result, None)
                await arrived

        assert (await BodyReader().read(_request(sent()), parse_completion)).prompts == ["a"]

    asyncio.run(main())


def test_a_clients_bodies_do_not_hold_up_anothers() -> None:
    bodies = BodyReader(lambda request: str(request.headers.get("x-quire-client")))
    parsed: list[str] = []
    begin = threading.Event()

    async def body(client: str) -> None:
        async def sent() -> AsyncIterator[bytes]:
            yield b"{}" + b" " * INLINE_BYTES

        await bodies.read(_request(sent(), client), lambda _: parsed.append(client))

    async def main() -> None:
        busy = [asyncio.create_task(bodies.threads.run("a", begin.wait)) for _ in range(MAX_THREADS)]
        reading = [asyncio.create_task(body("a")) for _ in range(6)]
        await until(lambda: sum(map(len, bodies.threads._waiting.values())) == 6)
        reading.append(asyncio.create_task(body("b")))
        await until(lambda: "b" in bodies.threads._waiting)
        begin.set()
        await asyncio.gather(*busy, *reading)

    asyncio.run(main())
    assert sorted(parsed) == ["a"] * 6 + ["b"]
    assert "b" in parsed[: 2 * MAX_THREADS]  # after at most one of each thread, and one beside it


def _request(chunks: AsyncIterator[bytes], client: str = "") -> Request:
    async def receive() -> dict[str, Any]:
        try:
            return {"type": "http.request", "body": await anext(chunks), "more_body": True}
        except StopAsyncIteration:
            return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"x-quire-client", client.encode())] if client else []
    return Request({"type": "http", "headers": headers, "method": "POST", "path": "/"}, receive)


@pytest.mark.parametrize("size", [0, 1 << 18, (1 << 18) - 7, (1 << 18) - 8, (1 << 19) + 5])
def test_invalid_utf8_is_found_at_its_byte_in_any_piece(size: int) -> None:
    for wrong in (b"\xff", b"\xe4\xb8", b"\xe4\xb8a"):
        body = b'{"a":"' + b"b" * size + wrong
        with pytest.raises(ApiError, match=f"byte {6 + size}$"):
            parse_json_object(body)


def test_a_character_may_lie_across_pieces() -> None:
    for size in range((1 << 18) - 12, 1 << 18):
        text = "b" * size + "中文"
        assert parse_json_object(json.dumps({"a": text}, ensure_ascii=False).encode()) == {"a": text}


def test_a_request_that_is_refused_without_its_body_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it waits for its turn, and after."""
    parsed, checked = [], 0
    whole = request_body.parse_json_object
    monkeypatch.setattr(request_body, "parse_json_object", lambda body: parsed.append(len(body)) or whole(body))

    def check(request: Request) -> None:
        nonlocal checked
        checked += 1
        if checked in refused:
            raise ApiError(429, "beyond its limits")

    bodies = BodyReader(check=check)

    async def work(client: httpx.AsyncClient) -> None:
        for padding in (0, INLINE_BYTES):
            statuses = [(await client.post("/", content=b"{}" + b" " * padding)).status_code for _ in range(3)]
            assert statuses == [429, 429, 200]

    refused = {1, 3, 6, 8}  # two checks of each request, one of each that the first refuses
    run(bodies, lambda body: None, work)
    assert parsed == [2, 2 + INLINE_BYTES]
    assert bodies.held_bytes == 0
