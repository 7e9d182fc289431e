"""What a server says of its fleet: the live page's events, again and again, until nobody wants them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from app.config import CLIENT_KEY
from engine.errors import one_line

AGAIN_S = 2.0
"""Pause before a server that did not answer, or refused, is asked again."""

SILENT_S = 20.0
"""A stream without an event for so long is given up."""

CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """What ``app.dashboard.fleet_view.view`` makes of each model."""

    at: float
    models: dict[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """The earlier points of each model."""

    models: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is nothing new, in words for the user."""

    text: str


@dataclass(slots=True)
class Server:
    """One server at ``url``, asked with ``key``, if it is not empty.

    Raises:
        ValueError: the URL is none.
    """

    url: str
    key: str = field(default="", repr=False)
    transport: httpx.AsyncBaseTransport | None = None  # of tests

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or not _is_port(parts.netloc):
            raise ValueError(f"{self.url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.key = self.key or unquote(parts.password or "")  # as a browser takes it
        path = parts.path.rstrip("/").removesuffix("/v1").removesuffix("/dashboard")
        self.url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))

    async def events(self) -> AsyncIterator[FleetView | History | Trouble]:
        """All events of the server; reconnects when a connection ends or fails."""
        async with self._client() as http:
            while True:
                began = asyncio.get_running_loop().time()
                try:
                    async for event in self._stream(http):
                        yield event
                except httpx.TimeoutException:
                    yield Trouble(f"{self.url} does not answer; trying again")
                except httpx.HTTPError as error:
                    yield Trouble(f"cannot reach {self.url}: {_reason(error)}; trying again")
                except ValueError as error:
                    yield Trouble(f"{self.url} is not a Quire server: {error}; trying again")
                # The server ends each stream after a while; one that ends at once must not make this spin.
                await asyncio.sleep(max(AGAIN_S - (asyncio.get_running_loop().time() - began), 0.0))

    async def blocks(self, model: str, replica: str) -> dict[str, Any] | str:
        """The block map of one replica; or why there is none."""
        return await self._ask("blocks", model=model, replica=replica)

    async def prefixes(self, model: str) -> list[dict[str, Any]] | str:
        """The shared prefixes of a model's prompts; or why there are none."""
        found = await self._ask("prefixes", model=model)
        return found if isinstance(found, str) else list(found.get("prefixes", ()))

    async def _ask(self, part: str, **parameters: str) -> dict[str, Any] | str:
        """A part of the live page; or why there is none."""
        try:
            async with self._client() as http:
                answer = await http.get(f"{self.url}/dashboard/{part}", params=parameters)
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
            return "only an administrator's key may see it" if answer.status_code == 403 else _said(answer)
        except (httpx.HTTPError, ValueError) as error:
            return _reason(error)

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        return httpx.AsyncClient(headers=headers, timeout=timeout, transport=self.transport)

    async def _stream(self, http: httpx.AsyncClient) -> AsyncIterator[FleetView | History | Trouble]:
        """One connection's events.

        Raises:
            httpx.HTTPError: there is no connection, or it broke.
            ValueError: what comes are no events.
        """
        async with http.stream("GET", f"{self.url}/dashboard/events") as answer:
            if answer.status_code != 200:
                await answer.aread()
                yield Trouble(self._refusal(answer))
                return
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise ValueError("/dashboard/events has no events")
            name = ""
            async for line in answer.aiter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "data" and name in ("history", "fleet"):
                    yield _event(name, json.loads(value))

    def _refusal(self, answer: httpx.Response) -> str:
        if answer.status_code == 401:
            if self.key:
                return f"{self.url} rejects the key: {_said(answer)}; trying again"
            return f"{self.url} needs a key: set {CLIENT_KEY}, or give --key; trying again"
        if answer.status_code == 404:
            return f"{self.url} has no live page, so it is not a Quire server; trying again"
        return f"{self.url} rejects the request: {_said(answer)}; trying again"


def _event(name: str, message: Any) -> FleetView | History:
    """What an event says.

    Raises:
        ValueError: it has another shape.
    """
    try:
        return (
            History(dict(message)) if name == "history" else FleetView(message["at"], dict(message["models"]))
        )
    except (KeyError, TypeError) as error:
        raise ValueError("its events are from another release") from error


def _is_port(netloc: str) -> bool:
    _, colon, port = netloc.rpartition("@")[2].rpartition("]")[2].partition(":")
    return not colon or port.isdecimal()


def _said(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's form; else the status."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status_code}"
    return str(message)


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return one_line(error)
