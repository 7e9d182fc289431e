"""Requests that run when the server stops are told so: a stream that is cut looks complete to some clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from engine_client_setting import until
from ingress_support import ingress_for
from loopback import LoopbackHandle
from starlette.types import ASGIApp, Message

from app import config
from app.api.routes import make_api
from app.fleet.engine_client import STOPPING, EngineClient

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")

BODY = {"prompt": [5, 6], "max_tokens": 99, "seed": 1}
PATH = "/v1/completions"


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, one_tokenizer: None) -> None:
    monkeypatch.setattr("app.ingress_model.tokenizer_digest", lambda _: "tokenizer")
    # The replicas and their channels are on the test's loop.
    monkeypatch.setattr(
        "app.ingress_model.EngineClient", lambda *a, channel_thread, **options: EngineClient(*a, **options)
    )


async def stream(api: ASGIApp, sent: list[bytes]) -> None:
    """A streamed completion; ``sent`` gets the pieces of its body as they come."""
    body = [{"type": "http.request", "body": json.dumps({**BODY, "stream": True}).encode()}]

    async def receive() -> Message:
        if body:
            return body.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        sent.extend(filter(None, [message.get("body")]))

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
    await api(scope, receive, send)


def test_all_that_runs_and_all_that_comes_is_told_that_the_server_stops() -> None:
    async def test() -> None:
        handle = LoopbackHandle(1)
        ingress = ingress_for(config.load({"instance": "test"}, {}), handle)
        api = make_api(lambda: ingress.server)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://ingress")
        try:
            await ingress.reconfigure({})
            await until(lambda: len(handle.fleet.ledger.routable()) == 1)
            (replica,) = handle.replicas.values()
            sent = list[bytes]()
            running = asyncio.create_task(stream(api, sent))
            await until(lambda: len(replica.engine.live) == 1)
            handle.step()
            await until(lambda: len(sent) == 1)
            whole = asyncio.create_task(http.post(PATH, json=BODY))
            await until(lambda: len(replica.engine.live) == 2)
            await ingress.end_requests()
            assert (running.done(), whole.done()) == (True, True)
            last = json.loads(sent[-1].removeprefix(b"data: "))["error"]
            assert (last["code"], last["message"]) == ("unavailable", STOPPING)
            for response in (await whole, await http.post(PATH, json=BODY)):
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["message"]) == (503, "unavailable", STOPPING)
                assert response.headers["retry-after"] == "1"
        finally:
            await ingress.__del__()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_request_that_does_not_end_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may read slowly."""
    monkeypatch.setattr("app.ingress.ENDED_WITHIN_S", 0.01)

    async def test() -> None:
        ingress = ingress_for(config.load({"instance": "test"}, {}), LoopbackHandle(0))
        ingress.server.live.count = 1
        await ingress.end_requests()
        await ingress.__del__()

    asyncio.run(asyncio.wait_for(test(), 60))
