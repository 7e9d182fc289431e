"""How ``app.top`` follows a server: what it says of one that is not there, and that it comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.top import __main__ as top
from app.top import server as top_server
from app.top.server import FleetView, History, Server, Trouble


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)


EVENTS = (
    'retry: 500\n\nevent: history\ndata: {"m":[]}\n\n'
    'event: fleet\ndata: {"at":1.5,"models":{"m":{}}}\n\nevent: unknown\ndata: 1\n\n'
)


def said(server: Server, count: int) -> list[Any]:
    async def test() -> list[Any]:
        found: list[Any] = []
        async for event in server.events():
            found.append(event)
            if len(found) == count:
                break
        return found

    return asyncio.run(test())


def test_it_comes_back_after_every_kind_of_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_server, "AGAIN_S", 0.0)
    refused = ConnectionRefusedError(111, "Connection refused")
    answers = iter(
        (
            httpx.ConnectError("all attempts failed"),
            httpx.ReadTimeout("silent"),
            httpx.Response(401, json={"error": {"message": "the API key is not valid"}}),
            httpx.Response(503, json={"error": {"message": "32 pages are open"}}),
            httpx.Response(404),
            httpx.Response(200, text="hello"),
            stream(EVENTS),
            stream("event: fleet\ndata: {\n\n"),
            stream('event: fleet\ndata: {"x":1}\n\n'),
            stream("event: history\ndata: 5\n\n"),
            stream(EVENTS),
        )
    )

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer k"
        assert str(request.url) == "https://host:8443/quire/dashboard/events"
        found = next(answers)
        if isinstance(found, httpx.ConnectError):
            raise found from refused
        if isinstance(found, Exception):
            raise found
        return found

    server = Server("https://any:k@host:8443/quire/v1/", transport=httpx.MockTransport(answer))
    url = server.url
    assert said(server, 13) == [
        Trouble(f"cannot reach {url}: Connection refused; trying again"),
        Trouble(f"{url} does not answer; trying again"),
        Trouble(f"{url} rejects the key: the API key is not valid; trying again"),
        Trouble(f"{url} rejects the request: 32 pages are open; trying again"),
        Trouble(f"{url} has no live page, so it is not a Quire server; trying again"),
        Trouble(f"{url} is not a Quire server: /dashboard/events has no events; trying again"),
        History({"m": []}),
        FleetView(1.5, {"m": {}}),
        Trouble(
            f"{url} is not a Quire server: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1); trying again"
        ),
        *[Trouble(f"{url} is not a Quire server: its events are from another release; trying again")] * 2,
        History({"m": []}),
        FleetView(1.5, {"m": {}}),
    ]
    assert "k'" not in repr(server)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused_before_the_terminal_changes(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main([url]) == 1
    assert "is not the URL of a server" in capsys.readouterr().err


def test_without_a_terminal_it_says_what_else_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["host:8000"]) == 1
    assert "GET /metrics" in capsys.readouterr().err
